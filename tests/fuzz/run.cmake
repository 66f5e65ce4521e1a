# Builds the fuzzer of TARGET with clang's libFuzzer and AddressSanitizer and runs it:
# cmake -DCOMPILER=... -DSOURCE=... -DTARGET=... -DFUZZER=... -DWORK=... -DSECONDS=... -P run.cmake
file(GLOB base_sources RELATIVE ${SOURCE} ${SOURCE}/base/*.cc)
set(checkpoint_files_sources
  cpu_optim/optimizer_options.cc io/checksum.cc engine/checkpoint/checkpoint_manifest.cc engine/checkpoint/pickle_reader.cc engine/checkpoint/safetensors_header.cc)
set(commit_record_sources
  io/checksum.cc engine/store/commit_choice.cc engine/store/commit_format.cc engine/store/commit_record.cc)
set(trace_reader_sources
  engine/run/step_timeline.cc base/trace/nvtx_absent.cc base/trace/trace_recorder.cc base/trace/trace_clock.cc base/trace/trace_format.cc base/trace/trace_writer.cc
  tools/trace/interval_set.cc tools/trace/trace_advice.cc tools/trace/trace_analysis.cc tools/trace/trace_causes.cc tools/trace/trace_engine.cc tools/trace/trace_open_spans.cc tools/trace/trace_ranks.cc tools/trace/trace_reader.cc tools/trace/trace_steps.cc tools/trace/trace_summary.cc)
set(sources ${base_sources} ${${TARGET}_sources})
list(TRANSFORM sources PREPEND ${SOURCE}/)
list(APPEND sources ${FUZZER})
file(MAKE_DIRECTORY ${WORK}/corpus)
execute_process(COMMAND ${COMPILER} -std=c++20 -O1 -g -fsanitize=fuzzer,address -I${SOURCE} -I${SOURCE}/base/include -I${SOURCE}/gpu/include -I${SOURCE}/engine/include ${sources} -o ${WORK}/${TARGET}_fuzz -lfmt -lxxhash -lhwloc -lpthread
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND ${WORK}/${TARGET}_fuzz -max_total_time=${SECONDS} -rss_limit_mb=2048 -max_len=65536 ${WORK}/corpus
                WORKING_DIRECTORY ${WORK} COMMAND_ERROR_IS_FATAL ANY)
