# For 64-bit ARM, by Debian's cross compiler, with the libraries of its architecture arm64 beside the machine's own. QEMU runs the
# tests. Packages: g++-aarch64-linux-gnu and qemu-user, and the libraries of tools/packages.txt with ":arm64" behind their names.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64)
set(ENV{PKG_CONFIG_LIBDIR} /usr/lib/aarch64-linux-gnu/pkgconfig:/usr/share/pkgconfig)
