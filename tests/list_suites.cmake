# Writes a CTest file with one case for each suite of a GoogleTest program. Run after the program has been linked:
#   cmake -DPROGRAM=FILE -DNAME=PREFIX -DOUTPUT=FILE -DPROPERTIES=LIST -P list_suites.cmake
execute_process(COMMAND ${PROGRAM} --gtest_list_tests OUTPUT_VARIABLE listing RESULT_VARIABLE result TIMEOUT 60)
if(NOT result EQUAL 0)
  file(REMOVE ${PROGRAM})  # so that the next build tries again
  message(FATAL_ERROR "${PROGRAM} --gtest_list_tests: ${result}")
endif()
string(REGEX MATCHALL "\n[^ \n][^\n]*" lines "\n${listing}")
set(text "")
foreach(line ${lines})
  # "Suite.", and behind it a comment where it has a type; what GoogleTest prints before the list has no such end.
  if(line MATCHES "^\n([A-Za-z0-9_/]+)[.]( +#.*)?$")
    set(suite ${CMAKE_MATCH_1})
    string(APPEND text "add_test([=[${NAME}.${suite}]=] [=[${PROGRAM}]=] [=[--gtest_filter=${suite}.*]=])\n"
                       "set_tests_properties([=[${NAME}.${suite}]=] PROPERTIES ${PROPERTIES})\n")
  endif()
endforeach()
if(text STREQUAL "")
  file(REMOVE ${PROGRAM})
  message(FATAL_ERROR "${PROGRAM} has no tests")
endif()
file(WRITE ${OUTPUT} "${text}")
