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
class DoctorDrives : public testing::Test {
 protected:
  DoctorDrives() {
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
  Finding look(const std::string& subject) const {
    for (const Finding& finding :
         examine({.paths = {folder_.path()}, .mpi_library = {}, .sysfs = sysfs()})) {
      if (finding.subject == subject) return finding;
    }
    return {};
  }

  const TempDirectory folder_;
  std::string number_;
};

class DoctorWriteCache : public DoctorDrives {
 protected:
  Finding look() const { return DoctorDrives::look("write cache " + folder_.path()); }
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

class DoctorLinks : public DoctorDrives {
 protected:
  struct Device {
    std::string kind = "0x010802";  // an NVMe controller
    std::string vendor = "0x144d";
    int node = 0;
    std::string speed = "16.0 GT/s PCIe";
    std::string speed_max = "16.0 GT/s PCIe";
    int lanes = 4;
    int lanes_max = 4;
    std::string below = "";  // the bridges above it, each with a slash
  };

  // Processors 0 to 3 are on node 0, and some that no machine has on node 1.
  DoctorLinks() {
    for (const auto& [node, list] : {std::pair{"node0", "0-1023"}, {"node1", "99990-99999"}})
      write("/devices/system/node/" + std::string(node) + "/cpulist", list);
  }

  void write(const std::string& path, const std::string& line) const {
    const std::filesystem::path file = sysfs() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << line << "\n";
  }
  void add(const std::string& address, const Device& device) const {
    const std::string folder = "/devices/pci0000:00/" + device.below + address;
    write(folder + "/class", device.kind);
    write(folder + "/vendor", device.vendor);
    write(folder + "/numa_node", std::to_string(device.node));
    write(folder + "/current_link_speed", device.speed);
    write(folder + "/max_link_speed", device.speed_max);
    write(folder + "/current_link_width", std::to_string(device.lanes));
    write(folder + "/max_link_width", std::to_string(device.lanes_max));
    std::filesystem::create_directories(sysfs() + "/bus/pci/devices");
    std::filesystem::create_directory_symlink(
        "../../../devices/pci0000:00/" + device.below + address,
        sysfs() + "/bus/pci/devices/" + address);
  }
  void add_gpu(int node, int lanes, const std::string& speed = "2.5 GT/s PCIe") const {
    add("0000:3b:00.0", {.kind = "0x030200",
                         .vendor = "0x10de",
                         .node = node,
                         .speed = speed,
                         .speed_max = "32.0 GT/s PCIe",
                         .lanes = lanes,
                         .lanes_max = 16});
  }
  void add_nvme(const Device& device) const {
    add("0000:01:00.0", device);
    const std::string drive = "pci0000:00/" + device.below + "0000:01:00.0/nvme/nvme0/nvme0n1";
    std::filesystem::create_directories(sysfs() + "/devices/" + drive + "/queue");
    be_on(drive);
  }
  Finding look() const { return DoctorDrives::look("links"); }
};

TEST_F(DoctorLinks, EveryGpuAndDriveHasItsNodeAndLink) {
  EXPECT_EQ(look().text, "the kernel names no GPU and no drive on PCIe");
  add_gpu(0, 16);
  add_nvme({});
  add("0000:02:00.0", {.kind = "0x030000", .vendor = "0x8086"});  // a display, but no GPU to use
  const Finding found = look();
  EXPECT_EQ(found.text, "node 0: GPU 0000:3b:00.0 (2.5 GT/s x16), nvme0n1 (16.0 GT/s x4)");
  EXPECT_EQ(found.health, Health::kOk) << "an idle GPU is slow on purpose";
  EXPECT_EQ(found.remedy, "");
}

// A port of the processor alone is no switch; of switches behind each other the last one counts.
TEST_F(DoctorLinks, DevicesOfASwitchNameIt) {
  add("0000:3b:00.0", {.kind = "0x030200",
                       .vendor = "0x10de",
                       .speed = "2.5 GT/s PCIe",
                       .speed_max = "32.0 GT/s PCIe",
                       .lanes = 16,
                       .lanes_max = 16,
                       .below = "0000:00:01.0/0000:10:00.0/0000:11:04.0/"});
  add("0000:af:00.0",
      {.kind = "0x030200", .vendor = "0x10de", .lanes = 0, .below = "0000:00:03.0/"});
  add_nvme({.below = "0000:00:01.0/0000:10:00.0/0000:11:08.0/0000:12:00.0/0000:13:00.0/"});
  EXPECT_EQ(look().text,
            "node 0: GPU 0000:3b:00.0 (2.5 GT/s x16, switch 0000:10:00.0), "
            "GPU 0000:af:00.0 (link not reported), "
            "nvme0n1 (16.0 GT/s x4, switch 0000:12:00.0)");
}

TEST_F(DoctorLinks, LanesAndSpeedThatAreMissing) {
  add_gpu(0, 8);
  add_nvme({.speed = "8.0 GT/s PCIe", .lanes = 2});
  const Finding found = look();
  EXPECT_EQ(found.health, Health::kWarn);
  EXPECT_NE(found.text.find("GPU 0000:3b:00.0 has 8 of its 16 lanes"), std::string::npos)
      << found.text;
  EXPECT_NE(found.text.find("nvme0n1 has 2 of its 4 lanes"), std::string::npos) << found.text;
  EXPECT_NE(found.text.find("nvme0n1 runs at 8.0 of its 16.0 GT/s"), std::string::npos);
  EXPECT_EQ(found.remedy,
            "seat it anew, or move it to a slot with all lanes; look for a slot or a BIOS setting "
            "of its generation");
}

TEST_F(DoctorLinks, ADriveOfAnotherSocket) {
  add_gpu(0, 16);
  write("/devices/system/node/node1/cpulist", "0-1023");
  add_nvme({.node = 1});
  const Finding found = look();
  EXPECT_EQ(found.health, Health::kWarn);
  EXPECT_NE(found.text.find("nvme0n1 is on node 1, and no GPU is there but on 0: "),
            std::string::npos)
      << found.text;
  EXPECT_NE(found.remedy.find("storage.paths"), std::string::npos);
}

TEST_F(DoctorLinks, AProcessOnTheSocketOfOneOfTheGpus) {
  add_gpu(0, 16);
  add("0000:af:00.0", {.kind = "0x030200", .vendor = "0x10de", .node = 1});
  EXPECT_EQ(look().health, Health::kOk) << look().text;
}

TEST_F(DoctorLinks, AProcessThatIsKeptAwayFromItsGpu) {
  add_gpu(1, 16);
  const Finding found = look();
  EXPECT_EQ(found.health, Health::kWarn);
  EXPECT_NE(found.text.find("this process may not compute on node 1, where GPU 0000:3b:00.0 is"),
            std::string::npos)
      << found.text;
  EXPECT_EQ(found.remedy, "numactl --cpunodebind=1 --membind=1");
}

TEST_F(DoctorLinks, AVirtualMachineThatTellsNothing) {
  add_nvme({.node = -1, .speed = "Unknown", .speed_max = "Unknown", .lanes = 0, .lanes_max = 255});
  const Finding found = look();
  EXPECT_EQ(found.text, "nvme0n1 (link not reported)");
  EXPECT_EQ(found.health, Health::kOk);
}

}  // namespace
}  // namespace sluice::test
