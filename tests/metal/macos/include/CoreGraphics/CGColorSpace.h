// The one name of this header that metal-cpp's headers mention.
#pragma once
typedef struct CGColorSpace* CGColorSpaceRef;
