# The tests of the installed package: what is in it, and that examples/ build against it alone, as any application would.
#   MODE=headers   installs the build tree SLUICE_BUILD to WORK/prefix; exactly the public headers of SOURCE are there, and
#                  each compiles alone in C++20, with nothing but the standard library beside them
#   MODE=example   builds SOURCE against WORK/prefix and runs it with WORK/NAME as its folder
# Given with -D: MODE, SLUICE_BUILD, SOURCE, WORK, NAME, GENERATOR, COMPILER, BUILD_TYPE, FLAGS (the sanitizer's, or nothing).
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${status}): ${command}")
  endif()
endfunction()

if(MODE STREQUAL "headers")
  file(REMOVE_RECURSE ${WORK})
  file(MAKE_DIRECTORY ${WORK})
  run(${CMAKE_COMMAND} --install ${SLUICE_BUILD} --prefix ${WORK}/prefix)
  file(GLOB public RELATIVE ${SOURCE} ${SOURCE}/*/include/sluice/*.h ${SOURCE}/capi/sluice.h)
  list(TRANSFORM public REPLACE "^.*/" "")
  list(SORT public)
  file(GLOB_RECURSE installed RELATIVE ${WORK}/prefix/include ${WORK}/prefix/include/*)
  set(expected ${public})
  list(TRANSFORM expected PREPEND "sluice/")
  list(SORT installed)
  if(NOT installed STREQUAL expected)
    message(FATAL_ERROR "installed headers: ${installed}\nexpected: ${expected}")
  endif()
  foreach(header ${installed})
    file(WRITE ${WORK}/alone.cc "#include <${header}>\n")
    run(${COMPILER} -std=c++20 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I ${WORK}/prefix/include ${WORK}/alone.cc)
  endforeach()
  foreach(file share/sluice/sluice.schema.json share/sluice/LICENSE share/sluice/configs/quickstart.json
          share/sluice/examples/sine/main.cc)
    if(NOT EXISTS ${WORK}/prefix/${file})
      message(FATAL_ERROR "${file} is not installed")
    endif()
  endforeach()
else()
  file(REMOVE_RECURSE ${WORK}/${NAME})
  file(MAKE_DIRECTORY ${WORK}/${NAME})
  run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/${NAME}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
      -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_FLAGS=${FLAGS} -DCMAKE_C_FLAGS=${FLAGS}
      -DCMAKE_FIND_PACKAGE_NO_PACKAGE_REGISTRY=ON)
  run(${CMAKE_COMMAND} --build ${WORK}/${NAME}/build)
  run(${WORK}/${NAME}/build/${NAME} ${WORK}/${NAME})
endif()
