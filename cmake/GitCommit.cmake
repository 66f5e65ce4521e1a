# cmake -DSOURCE=DIR -DOUTPUT=FILE -P GitCommit.cmake: writes a source file that says which commit is built, where that has
# changed. An archive made by `git archive` has the commit in cmake/commit.txt (see .gitattributes).
cmake_policy(VERSION 3.25)
file(READ ${SOURCE}/cmake/commit.txt commit)
string(STRIP "${commit}" commit)
set(modified false)
if(NOT commit MATCHES "^[0-9a-f]+$")
  set(commit "")
  find_program(git git)
  if(git AND EXISTS ${SOURCE}/.git)
    execute_process(COMMAND ${git} -C ${SOURCE} rev-parse --verify HEAD OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE
                    ERROR_QUIET)
    execute_process(COMMAND ${git} -C ${SOURCE} diff --quiet HEAD RESULT_VARIABLE changed ERROR_QUIET)
    if(commit AND changed EQUAL 1)
      set(modified true)
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "namespace sluice {
extern const char* const kGitCommit;
extern const bool kGitModified;
const char* const kGitCommit = \"@commit@\";
const bool kGitModified = @modified@;
}  // namespace sluice
" @ONLY)
