// The findings of `sluice doctor` on a machine that has less than a build could use.
#include "tools/commands/doctor_command.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdlib>
#include <fstream>

#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// A PATH with an mpirun in it, or an empty one.
class DoctorMpi : public testing::Test {
 protected:
  DoctorMpi() : before_(std::getenv("PATH")) { ::setenv("PATH", folder_.path().c_str(), 1); }
  ~DoctorMpi() override { ::setenv("PATH", before_.c_str(), 1); }

  void add_file(const std::string& name) const {
    std::ofstream(folder_.file(name)) << "#!/bin/sh\n";
    ::chmod(folder_.file(name).c_str(), 0755);
  }
  Finding look(const std::string& library) const {
    for (const Finding& finding : examine({.paths = {}, .mpi_library = library})) {
      if (finding.subject == "MPI") return finding;
    }
    return {};
  }

  const TempDirectory folder_;
  const std::string before_;
};

TEST_F(DoctorMpi, ALauncherIsOfNoUseToABuildWithoutMpi) {
  EXPECT_NE(look(folder_.file("library.so")).text.find("no mpirun"), std::string::npos);
  add_file("mpirun");
  const Finding missing = look(folder_.file("library.so"));
  EXPECT_EQ(missing.health, Health::kWarn);
  EXPECT_NE(missing.text.find("this build has no MPI (SLUICE_MPI)"), std::string::npos);
  EXPECT_NE(missing.remedy.find("SLUICE_MPI=ON"), std::string::npos);
  add_file("library.so");
  const Finding found = look(folder_.file("library.so"));
  EXPECT_EQ(found.health, Health::kOk);
  EXPECT_EQ(found.text, folder_.file("mpirun"));
}

}  // namespace
}  // namespace sluice::test
