/* Training in C: a line learns to go through points, with its two numbers and their Adam state on
 * NVMe. An argument names the folder for them; the current one is the default. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sluice/sluice.h>

static void check(sluice_status status) {
  if (status == SLUICE_OK) return;
  fprintf(stderr, "sluice: %s\n", sluice_last_error());
  exit(1);
}

/* A path with quotes or backslashes would need JSON's escapes. */
static void write_config(char* config, size_t size, const char* folder) {
  if (strpbrk(folder, "\"\\") != NULL) {
    fprintf(stderr, "line: a folder with a quote or a backslash: %s\n", folder);
    exit(1);
  }
  const int length =
      snprintf(config, size,
               "{\"precision\": {\"parameters\": \"fp32\", \"gradients\": \"fp32\"},"
               " \"memory\": {\"device\": \"1MiB\", \"host\": \"4MiB\"},"
               " \"placement\": {\"parameters\": \"nvme\", \"optimizer\": \"nvme\"},"
               " \"optimizer\": {\"weight_decay\": 0}, \"storage\": {\"paths\": [\"%s\"]}}",
               folder);
  if (length < 0 || (size_t)length >= size) {
    fprintf(stderr, "line: the folder's path is too long: %s\n", folder);
    exit(1);
  }
}

/* The line begins as y = 0. */
static int zeros(void* context, uint32_t tensor, uint64_t first, float* values, uint64_t count) {
  (void)context, (void)tensor, (void)first;
  for (uint64_t i = 0; i < count; ++i) values[i] = 0;
  return 0;
}

/* The mean squared error of y = line[0] * x + line[1] against y = 2 x - 1, and its gradient. */
static float compute(const float* line, float* gradient) {
  float loss = 0;
  for (int i = 0; i < 16; ++i) {
    const float x = (float)i / 8 - 1;
    const float error = line[0] * x + line[1] - (2 * x - 1);
    loss += error * error / 16;
    if (gradient != NULL) gradient[0] += error * x / 8, gradient[1] += error / 8;
  }
  return loss;
}

int main(int argc, char** argv) {
  char config[8192];
  write_config(config, sizeof config, argc > 1 ? argv[1] : ".");
  const uint64_t shape[1] = {2};
  const sluice_tensor tensor = {.name = "line", .shape = shape, .dimensions = 1};
  const sluice_unit unit = {.name = "line", .tensors = &tensor, .tensor_count = 1};
  const sluice_model model = {.units = &unit, .unit_count = 1, .concurrent_leases = 1};

  sluice_engine* engine = NULL;
  check(sluice_engine_create(config, &model, &engine));
  check(sluice_initialize(engine, zeros, NULL));
  float loss = 0;
  for (int step = 1; step <= 300; ++step) {
    const sluice_step_options options = {.learning_rate = 0.02, .micro_batches = 1};
    check(sluice_begin_step(engine, &options));
    sluice_lease lease;
    check(sluice_acquire(engine, 0, SLUICE_FORWARD, &lease));
    loss = compute(lease.parameters, NULL);
    check(sluice_release(engine, lease.id));
    check(sluice_acquire(engine, 0, SLUICE_BACKWARD, &lease));
    (void)compute(lease.parameters, lease.gradients);
    check(sluice_release(engine, lease.id));
    sluice_step_report report;
    check(sluice_finish_step(engine, NULL, &report));
    if (step % 100 == 0)
      printf("step %d: loss %.6f, norm %.6f\n", step, loss, report.gradient_norm);
  }
  check(sluice_close(engine));
  printf("loss %.6f\n", loss);
  sluice_engine_destroy(engine);
  return loss < 1e-3f ? 0 : 1;
}
