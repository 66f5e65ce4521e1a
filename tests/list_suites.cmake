# Writes a CTest file with one case for each suite of a GoogleTest program. Run after the program has been linked:
#   cmake -DPROGRAM=FILE -DNAME=PREFIX -DOUTPUT=FILE -DPROPERTIES=LIST -DTIMEOUT=S [-DPIECE=N] [-DONCE=SHARED|WHOLE]
#         [-DSANITIZE=ON] [-DWITHOUT=FILTER] [-DEMULATOR=COMMAND] -P list_suites.cmake
# A case of one test may take S seconds, and two minutes more for each further test. With PIECE, a suite of more tests becomes
# several cases of at most N tests each; GoogleTest deals the tests out to them in turn. With ONCE, the build of sanitizers
# (SANITIZE) and the release build divide the cases between them. With SHARED, three in four of the cases of a suite with
# parameters are left to the release build, if there are three or more; there they keep their label, and under sanitizers they
# have the label "more". All others are left to sanitizers, and have the label "sanitized" beside their own in other builds. The
# tests that WITHOUT names do not run. EMULATOR runs programs of another processor.
set(without "")
if(WITHOUT)
  set(without "-${WITHOUT}")
endif()
set(emulator "")
foreach(word ${EMULATOR})
  string(APPEND emulator " [=[${word}]=]")
endforeach()
execute_process(COMMAND ${EMULATOR} ${PROGRAM} --gtest_list_tests "--gtest_filter=*${without}"
                OUTPUT_VARIABLE listing RESULT_VARIABLE result TIMEOUT 60)
if(NOT result EQUAL 0)
  file(REMOVE ${PROGRAM})  # so that the next build tries again
  message(FATAL_ERROR "${PROGRAM} --gtest_list_tests: ${result}")
endif()
# A list in CMake does not end an element inside brackets, and the values of parameters have such: only the names are kept.
string(REGEX REPLACE " +#[^\n]*" "" listing "\n${listing}")
string(REGEX REPLACE "[][;]" "_" listing "${listing}")
string(REGEX MATCH "\n[A-Za-z0-9_/]+[.]\n.*" listing "${listing}")  # without what programs print before the list
string(REGEX MATCHALL "\n  [^ \n]" tests "${listing}")
list(LENGTH tests listed)
set(covered 0)
set(text "")

# add_suite(SUITE COUNT): the cases of a suite of COUNT tests.
macro(add_suite suite count)
  set(pieces 1)
  if(PIECE)
    math(EXPR pieces "(${count} + ${PIECE} - 1) / ${PIECE}")
  endif()
  math(EXPR covered "${covered} + ${count}")
  math(EXPR seconds "${TIMEOUT} + 120 * ((${count} + ${pieces} - 1) / ${pieces} - 1)")
  foreach(piece RANGE 1 ${pieces})
    set(name "${NAME}.${suite}")
    set(shard "")
    if(pieces GREATER 1)
      math(EXPR index "${piece} - 1")
      string(APPEND name ".${piece}_of_${pieces}")
      set(shard "ENVIRONMENT_MODIFICATION [==[GTEST_TOTAL_SHARDS=set:${pieces};GTEST_SHARD_INDEX=set:${index}]==]")
    endif()
    set(own "${PROPERTIES}")
    set(kept ${pieces})
    if("${ONCE}" STREQUAL "SHARED" AND "${suite}" MATCHES "/" AND pieces GREATER 2)
      math(EXPR kept "(${pieces} + 3) / 4")
    endif()
    if(SANITIZE AND piece GREATER kept)
      string(REGEX REPLACE "LABELS\\]==\\] \\[==\\[[a-z]+" "LABELS]==] [==[more" own "${own}")
    elseif(ONCE AND NOT SANITIZE AND NOT piece GREATER kept)
      string(REGEX REPLACE "LABELS\\]==\\] \\[==\\[[a-z]+" "\\0;sanitized" own "${own}")
    endif()
    string(APPEND text "add_test([=[${name}]=]${emulator} [=[${PROGRAM}]=] [=[--gtest_filter=${suite}.*${without}]=])\n"
                       "set_tests_properties([=[${name}]=] PROPERTIES ${own} TIMEOUT ${seconds} ${shard})\n")
  endforeach()
endmacro()

string(REGEX MATCHALL "\n[^\n]+" lines "${listing}")
set(suite "")
foreach(line ${lines})
  if(line MATCHES "^\n([A-Za-z0-9_/]+)[.]$")
    set(next ${CMAKE_MATCH_1})
    if(suite)
      add_suite(${suite} ${count})
    endif()
    set(suite ${next})
    set(count 0)
  elseif(line MATCHES "^\n  [^ ]")
    math(EXPR count "${count} + 1")
  endif()
endforeach()
if(suite)
  add_suite(${suite} ${count})
endif()
if(text STREQUAL "")
  file(REMOVE ${PROGRAM})
  message(FATAL_ERROR "${PROGRAM} has no tests")
endif()
if(NOT covered EQUAL listed)
  file(REMOVE ${PROGRAM})
  message(FATAL_ERROR "${PROGRAM} lists ${listed} tests, but the cases of its suites have ${covered}")
endif()
file(WRITE ${OUTPUT} "${text}")
