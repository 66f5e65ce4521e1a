// The findings of `sluice doctor` on a machine that has less than a build could use.
#include "tools/commands/doctor_command.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

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

// A kernel's tree for the drive behind a folder.
class DoctorWriteCache : public testing::Test {
 protected:
  DoctorWriteCache() {
    struct stat status {};
    ::stat(folder_.path().c_str(), &status);
    number_ = std::to_string(major(status.st_dev)) + ":" + std::to_string(minor(status.st_dev));
    std::filesystem::create_directories(sysfs() + "/dev/block");
  }

  std::string sysfs() const { return folder_.file("sys"); }
  void add_drive(const std::string& name, const std::string& mode) const {
    const std::string queue = sysfs() + "/devices/" + name + "/queue";
    std::filesystem::create_directories(queue);
    if (!mode.empty()) std::ofstream(queue + "/write_cache") << mode << "\n";
  }
  void be_on(const std::string& device) const {
    const std::string link = sysfs() + "/dev/block/" + number_;
    std::filesystem::remove(link);
    std::filesystem::create_directories(sysfs() + "/devices/" + device);
    std::filesystem::create_directory_symlink("../../devices/" + device, link);
  }
  Finding look() const {
    for (const Finding& finding :
         examine({.paths = {folder_.path()}, .mpi_library = {}, .sysfs = sysfs()})) {
      if (finding.subject == "write cache " + folder_.path()) return finding;
    }
    return {};
  }

  const TempDirectory folder_;
  std::string number_;
};

TEST_F(DoctorWriteCache, ADriveAndAPartitionOfOne) {
  EXPECT_NE(look().text.find("no drive of this machine"), std::string::npos);
  add_drive("nvme0n1", "write back");
  be_on("nvme0n1");
  EXPECT_EQ(look().health, Health::kOk);
  EXPECT_EQ(look().text.find("nvme0n1: volatile (write back)"), 0u) << look().text;
  be_on("nvme0n1/nvme0n1p2");
  EXPECT_EQ(look().text.find("nvme0n1: volatile (write back)"), 0u) << look().text;
  add_drive("sda", "write through");
  be_on("sda");
  EXPECT_EQ(look().health, Health::kWarn);
  EXPECT_NE(look().remedy.find("/sys/block/sda/queue/write_cache"), std::string::npos);
  add_drive("old", "");
  be_on("old");
  EXPECT_EQ(look().text, "old: unknown");
}

TEST_F(DoctorWriteCache, EveryDriveOfARaid) {
  add_drive("nvme0n1", "write back");
  add_drive("nvme1n1", "write through");
  add_drive("md0", "write back");
  std::filesystem::create_directories(sysfs() + "/devices/nvme1n1/nvme1n1p1");
  std::filesystem::create_directories(sysfs() + "/devices/md0/slaves");
  for (const char* const slave : {"nvme0n1", "nvme1n1/nvme1n1p1"})
    std::filesystem::create_directory_symlink(
        sysfs() + "/devices/" + slave,
        sysfs() + "/devices/md0/slaves/" + std::filesystem::path(slave).filename().string());
  be_on("md0");
  const Finding found = look();
  EXPECT_EQ(found.health, Health::kWarn);
  EXPECT_NE(found.text.find("nvme0n1: volatile"), std::string::npos) << found.text;
  EXPECT_NE(found.text.find("nvme1n1: the kernel takes it for a drive without a volatile cache"),
            std::string::npos)
      << found.text;
  EXPECT_EQ(found.text.find("md0"), std::string::npos) << found.text;
}

}  // namespace
}  // namespace sluice::test
