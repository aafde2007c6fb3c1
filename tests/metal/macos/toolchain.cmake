# For macOS on Apple silicon, from Linux; the folder of this file is the SDK that ../macos.py makes.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_OSX_ARCHITECTURES arm64)
set(CMAKE_OSX_DEPLOYMENT_TARGET 14.0)
set(CMAKE_OSX_SYSROOT "${CMAKE_CURRENT_LIST_DIR}")

set(CMAKE_CXX_COMPILER clang++-22)
set(CMAKE_CXX_COMPILER_TARGET arm64-apple-macos14.0)
set(CMAKE_CXX_FLAGS_INIT -fno-sized-deallocation)  # as Apple's clang does
set(CMAKE_AR llvm-ar-22)
set(CMAKE_RANLIB llvm-ranlib-22)
set(CMAKE_STRIP llvm-strip-22)
set(CMAKE_INSTALL_NAME_TOOL llvm-install-name-tool-22)
# As Apple's linker does on arm64; without the last line CMake would edit what is signed.
set(linker_flags "-fuse-ld=lld -Wl,-adhoc_codesign")
set(CMAKE_EXE_LINKER_FLAGS_INIT "${linker_flags}")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "${linker_flags}")
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
