# Included by project() (CMAKE_PROJECT_INCLUDE, set by mock.py): the extension on the mock device.
function(put_on_mock_device)
  set(folder "${CMAKE_CURRENT_FUNCTION_LIST_DIR}")
  target_sources(_ext PRIVATE "${folder}/mock.cpp")
  target_include_directories(_ext BEFORE PRIVATE "${folder}")
  target_compile_definitions(
    _ext PRIVATE _METAL_ DFLASH_METAL_MOCK BENCH_ROOT="${CMAKE_SOURCE_DIR}" BENCH_PYTHON="${Python_EXECUTABLE}")
  target_precompile_headers(
    _ext PRIVATE <functional> <sstream> <mlx/fast.h> <mlx/ops.h> <mlx/primitives.h> <mlx/utils.h>)
  # nothing here is about speed, but the build is: one translation unit, no optimisation
  set_target_properties(nanobind-static PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  get_property(targets DIRECTORY PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target IN LISTS targets)
    if(target MATCHES "^cpu_")
      target_compile_options(${target} PRIVATE -O0)
    endif()
  endforeach()
endfunction()
cmake_language(DEFER CALL put_on_mock_device)
