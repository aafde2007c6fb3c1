// The one name of this framework that metal-cpp's headers mention.
#pragma once
typedef double CFTimeInterval;
