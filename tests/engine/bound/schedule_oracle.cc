#include "tests/engine/bound/schedule_oracle.h"

#include "tests/engine/bound/oracle_jobs.h"

namespace sluice::test {

std::vector<long> step_begins(const OracleCase& given, int count) {
  return Oracle(given, count).run();
}

std::vector<OracleEvent> step_events(const OracleCase& given, int count) {
  Oracle oracle(given, count + 3);  // goes on until those have come to their end
  (void)oracle.run();
  std::vector<OracleEvent> events = oracle.events();
  std::erase_if(events, [&](const OracleEvent& event) { return event.step >= count; });
  return events;
}

}  // namespace sluice::test
