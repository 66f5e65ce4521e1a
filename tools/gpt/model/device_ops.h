// The arithmetic of GPT-2 on device memory. Each operation is enqueued on a stream. DeviceGpt uses
// only these operations. One implementation runs on a GPU (cuda_ops.h). Tests run the same bodies
// on the host device. Matrices are row-major, with one row per token. "T" is the type of parameters
// and activations, and "G" is the type of the parameters' gradients. Both types are fixed when the
// operations are made.
//
// Thread rule: one thread at a time. Every call enqueues its work and returns. Later work on the
// same stream may reuse the memory that a call names.
// Invariant: the same arguments give the same bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <sluice/device.h>
#include <sluice/dtype.h>
#include "tools/gpt/model/matmul.h"
#include "tools/gpt/model/row_kernels.h"

namespace sluice::gpt {

// The result is the product of `a` and `b`, plus `addend`, plus `bias`. `form` says whether one of
// the matrices `a` and `b` is transposed. The product is computed `batch` times. After each
// product, the address of each matrix advances by the matrix's batch stride. `a` and `b` have the
// type T.
struct Product {
  Form form = Form::kAB;
  std::uint64_t m = 0;  // rows of the result
  std::uint64_t n = 0;  // columns of the result
  std::uint64_t k = 0;  // the extent over which the product sums
  const void* a = nullptr;
  std::uint64_t a_stride = 0;  // elements from row to row
  const void* b = nullptr;
  std::uint64_t b_stride = 0;
  void* result = nullptr;
  std::uint64_t result_stride = 0;
  DType result_type = DType::kFp32;  // T, or fp32
  const void* bias = nullptr;        // T [n]; allowed only if the result has the type T
  const void* addend = nullptr;      // of the result's type; may be the result itself
  std::uint64_t batch = 1;
  std::uint64_t a_batch_stride = 0;
  std::uint64_t b_batch_stride = 0;
  std::uint64_t result_batch_stride = 0;
};

struct LayerNormForwardArguments {
  const void* x;  // T [rows, width]
  const void* weight;
  const void* bias;
  void* y;
  RowMoments* moments;  // [rows]
  std::uint64_t rows;
  std::uint64_t width;
};

struct LayerNormBackwardArguments {
  const void* x;
  const RowMoments* moments;
  const void* weight;
  const void* dy;
  void* dx;               // T [rows, width]
  Into into;              // overwrites dx, or adds to dx
  void* weight_gradient;  // G [width], overwritten
  void* bias_gradient;    // G [width], overwritten
  float* partials;        // scratch: 2 * sum_partials(rows, width) floats
  std::uint64_t rows;
  std::uint64_t width;
};

// The attention scores of several heads of each of several sequences. The scores are fp32
// [sequences, heads, sequence, sequence].
struct SoftmaxArguments {
  const float* scores;
  void* probabilities;  // T, in the shape of `scores`; zero beyond the diagonal
  float* log_sums;      // [sequences, heads, sequence]; forward writes, backward reads
  float scale;
  std::uint64_t sequences;
  std::uint64_t heads;
  std::uint64_t sequence;  // the length

  std::uint64_t rows() const { return sequences * heads * sequence; }
};

struct SoftmaxBackwardArguments {
  SoftmaxArguments forward;
  const float* d_probabilities;  // in the shape of `scores`
  void* d_scores;                // T, in the shape of `scores`; zero beyond the diagonal
  const void* y;                 // T: the output of the heads; `dy` is the gradient of y
  const void* dy;
  std::uint64_t y_stride;    // elements from row to row
  std::uint64_t head_width;  // elements from head to head
};

struct CrossEntropyArguments {
  void* logits;  // T [rows, vocabulary]; overwritten by the gradient if `gradient` is true
  const std::uint32_t* targets;
  float* row_losses;  // scratch
  double* loss;       // device memory: the mean over the rows
  bool gradient;
  float gradient_scale;  // a factor of the gradient
  std::uint64_t rows;
  std::uint64_t vocabulary;
  std::uint64_t stride;  // elements from row to row; the first `vocabulary` are used
};

struct EmbeddingArguments {
  const std::uint32_t* tokens;
  const void* token_table;     // T [vocabulary, width]
  const void* position_table;  // T [context, width]
  void* y;                     // T [rows, width]
  std::uint64_t rows;
  std::uint64_t sequence;
  std::uint64_t width;
};

// The positions in the batch, sorted by token. The positions of token v are the elements of `order`
// from begin[v] up to, but not including, begin[v + 1]. These positions are in the order of the
// batch.
struct EmbeddingBackwardArguments {
  const std::uint32_t* order;
  const std::uint32_t* begin;
  const void* dy;           // T [rows, width]
  void* token_gradient;     // G, all rows overwritten
  void* position_gradient;  // G, all rows overwritten
  std::uint64_t rows;
  std::uint64_t sequence;
  std::uint64_t width;
  std::uint64_t vocabulary;
  std::uint64_t context;
};

// A sum over rows is computed in two steps. The first step adds the rows of each piece, in order.
// The second step adds the sums of the pieces, in order. A piece has kPartialRows rows.
inline constexpr std::uint64_t kPartialRows = 64;
constexpr std::uint64_t sum_partials(std::uint64_t rows, std::uint64_t width) {
  return (rows + kPartialRows - 1) / kPartialRows * width;
}

// The supported pairs (type, gradient type) are (fp32, fp32), (bf16, bf16) and (bf16, fp32). Fails
// with kUnsupported for any other pair.
void check_device_types(DType type, DType gradient_type);

class DeviceOps {
 public:
  DeviceOps() = default;
  DeviceOps(const DeviceOps&) = delete;
  DeviceOps& operator=(const DeviceOps&) = delete;
  virtual ~DeviceOps() = default;

  virtual DType type() const = 0;           // T
  virtual DType gradient_type() const = 0;  // G
  // Returns the name of the library that computes products, such as "cuBLASLt 13.0" or "plain
  // kernels". The text is for people.
  virtual std::string description() const = 0;
  // Returns notes for the user about products that take far longer than expected. Each call returns
  // only the notes that are new since the last call.
  virtual std::vector<std::string> take_notes() { return {}; }

  virtual void multiply(const Product& product, StreamId stream) = 0;
  virtual void embedding_forward(const EmbeddingArguments& arguments, StreamId stream) = 0;
  virtual void embedding_backward(const EmbeddingBackwardArguments& arguments, StreamId stream) = 0;
  virtual void layer_norm_forward(const LayerNormForwardArguments& arguments, StreamId stream) = 0;
  virtual void layer_norm_backward(const LayerNormBackwardArguments& arguments,
                                   StreamId stream) = 0;
  virtual void gelu_forward(const void* x, void* y, std::uint64_t count, StreamId stream) = 0;
  // gradient *= GELU'(x), in place.
  virtual void gelu_backward(const void* x, void* gradient, std::uint64_t count,
                             StreamId stream) = 0;
  virtual void softmax_forward(const SoftmaxArguments& arguments, StreamId stream) = 0;
  virtual void softmax_backward(const SoftmaxBackwardArguments& arguments, StreamId stream) = 0;
  // Computes the gradient of a bias: sums[j] is the sum of column j of dy. dy is T [rows, width],
  // and `sums` is G [width]. `partials` is scratch memory for sum_partials(rows, width) floats.
  virtual void bias_backward(const void* dy, std::uint64_t rows, std::uint64_t width,
                             float* partials, void* sums, StreamId stream) = 0;
  virtual void cross_entropy(const CrossEntropyArguments& arguments, StreamId stream) = 0;
};

}  // namespace sluice::gpt
