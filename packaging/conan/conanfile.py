"""Recipe of the C++ and C libraries for conan 2, built from the archive beside this file, against the system's packages:

    conan create FOLDER -c tools.system.package_manager:mode=install    FOLDER is conan/ of what tools/release.sh has written
"""

import os

from conan import ConanFile
from conan.tools.cmake import CMake, cmake_layout
from conan.tools.files import check_sha256, copy, rmdir, unzip
from conan.tools.system import package_manager


class Sluice(ConanFile):
    name = "sluice"
    version = "@VERSION@"
    description = "Offload engine: trains neural networks that are larger than memory"
    license = "Apache-2.0"
    settings = "os", "arch", "compiler", "build_type"
    options = {"shared": [True, False]}
    default_options = {"shared": False}
    exports_sources = "sluice-*.tar.gz"
    package_type = "library"
    generators = "CMakeDeps"

    def layout(self):
        cmake_layout(self)

    def validate(self):
        if str(self.settings.os) != "Linux" or str(self.settings.arch) != "x86_64":
            from conan.errors import ConanInvalidConfiguration
            raise ConanInvalidConfiguration("Sluice runs under Linux on x86_64")

    def system_requirements(self):
        package_manager.Apt(self).install(["pkg-config", "ninja-build", "liburing-dev", "libtbb-dev", "libhwloc-dev", "libhwy-dev",
                                           "nlohmann-json3-dev", "libfmt-dev", "libxxhash-dev"])

    def source(self):
        archive = os.path.join(self.export_sources_folder, f"sluice-{self.version}.tar.gz")
        check_sha256(self, archive, "@SHA256@")
        unzip(self, archive, destination=self.source_folder, strip_root=True)

    def generate(self):
        from conan.tools.cmake import CMakeToolchain
        toolchain = CMakeToolchain(self, generator="Ninja")
        toolchain.cache_variables.update({
            "BUILD_SHARED_LIBS": bool(self.options.shared), "SLUICE_TESTS": False, "SLUICE_TOOLS": False, "SLUICE_C": True,
            "SLUICE_UNITY": True, "SLUICE_CUDA": "OFF", "SLUICE_MPI": "OFF", "SLUICE_NVTX": "OFF"})
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        rmdir(self, os.path.join(self.package_folder, "share"))

    def package_info(self):
        # Programs use the package's own files for CMake and pkg-config, which know the system's libraries behind the static ones.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["lib/cmake/sluice"]
