// A slow drive for a program that is started with this library in LD_PRELOAD: in each direction, one transfer at a time moves
// SLOW_DRIVE_RATE bytes per second. While the file SLOW_DRIVE_HOLD exists, reads do not return. While SLOW_DRIVE_NO_READS or
// SLOW_DRIVE_NO_WRITES exists, those transfers fail with EIO.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

typedef ssize_t (*read_function)(int, void*, size_t, off_t);
typedef ssize_t (*write_function)(int, const void*, size_t, off_t);

static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER, writing = PTHREAD_MUTEX_INITIALIZER;

static void sleep_ns(long long ns) {
  struct timespec left = {ns / 1000000000, ns % 1000000000};
  while (nanosleep(&left, &left) != 0) {
  }
}

static void move(pthread_mutex_t* direction, ssize_t bytes) {
  const char* rate = getenv("SLOW_DRIVE_RATE");
  if (rate == NULL || bytes <= 0) return;
  pthread_mutex_lock(direction);
  sleep_ns((long long)bytes * 1000000000 / atoll(rate));
  pthread_mutex_unlock(direction);
}

static int is_there(const char* variable) {
  const char* path = getenv(variable);
  return path != NULL && access(path, F_OK) == 0;
}

static ssize_t failed(void) {
  errno = EIO;
  return -1;
}

static ssize_t slow_read(const char* name, int file, void* data, size_t bytes, off_t offset) {
  while (is_there("SLOW_DRIVE_HOLD")) sleep_ns(5000000);
  if (is_there("SLOW_DRIVE_NO_READS")) return failed();
  const ssize_t moved = ((read_function)dlsym(RTLD_NEXT, name))(file, data, bytes, offset);
  move(&reading, moved);
  return moved;
}

static ssize_t slow_write(const char* name, int file, const void* data, size_t bytes, off_t offset) {
  if (is_there("SLOW_DRIVE_NO_WRITES")) return failed();
  const ssize_t moved = ((write_function)dlsym(RTLD_NEXT, name))(file, data, bytes, offset);
  move(&writing, moved);
  return moved;
}

ssize_t pread(int file, void* data, size_t bytes, off_t offset) {
  return slow_read("pread", file, data, bytes, offset);
}
ssize_t pread64(int file, void* data, size_t bytes, off64_t offset) {
  return slow_read("pread64", file, data, bytes, offset);
}
ssize_t pwrite(int file, const void* data, size_t bytes, off_t offset) {
  return slow_write("pwrite", file, data, bytes, offset);
}
ssize_t pwrite64(int file, const void* data, size_t bytes, off64_t offset) {
  return slow_write("pwrite64", file, data, bytes, offset);
}
