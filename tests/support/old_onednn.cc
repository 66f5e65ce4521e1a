// Stands for a oneDNN of long ago: a library of the right name with a version that is too old.
struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime, gpu_runtime;
};

extern "C" const Version* dnnl_version() {
  static const Version version = {1, 7, 0, "", 1, 0};
  return &version;
}
