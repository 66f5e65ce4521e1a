// The bodies of GPT-2's kernels (gpu/math/kernel_elements.h): embedding, layer norm, GELU, softmax,
// cross entropy, sums over rows, and a plain matrix product. T is the type of activations, G is the
// type of gradients, and the arithmetic is fp32. The formulas are the same as in
// tools/gpt/model/row_kernels.h, with one exception. The exponential function comes from the C
// library. The bodies are pure.
#pragma once

#include <math.h>

#include <cstdint>

#include "gpu/math/kernel_elements.h"
#include "tools/gpt/model/device_ops.h"

namespace sluice::gpt {

// Each team computes one row.
template <class T>
struct EmbeddingForwardBody {
  EmbeddingArguments a;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t row) const {
    const T* token = static_cast<const T*>(a.token_table) + a.tokens[row] * a.width;
    const T* position = static_cast<const T*>(a.position_table) + row % a.sequence * a.width;
    T* y = static_cast<T*>(a.y) + row * a.width;
    for (std::uint64_t j = team.rank(); j < a.width; j += team.size())
      store(load(token[j]) + load(position[j]), y[j]);
  }
};

// Each team computes the gradient of one row of the token table.
template <class T, class G>
struct TokenGradientBody {
  EmbeddingBackwardArguments a;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t token) const {
    G* gradient = static_cast<G*>(a.token_gradient) + token * a.width;
    const std::uint32_t begin = a.begin[token];
    const std::uint32_t end = a.begin[token + 1];
    for (std::uint64_t j = team.rank(); j < a.width; j += team.size()) {
      float sum = 0;
      for (std::uint32_t i = begin; i < end; ++i)
        sum += load(static_cast<const T*>(a.dy)[a.order[i] * a.width + j]);
      store(sum, gradient[j]);
    }
  }
};

// Each team computes the gradient of one row of the position table.
template <class T, class G>
struct PositionGradientBody {
  EmbeddingBackwardArguments a;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t position) const {
    G* gradient = static_cast<G*>(a.position_gradient) + position * a.width;
    const std::uint64_t end = position < a.sequence ? a.rows : 0;
    for (std::uint64_t j = team.rank(); j < a.width; j += team.size()) {
      float sum = 0;
      for (std::uint64_t row = position; row < end; row += a.sequence)
        sum += load(static_cast<const T*>(a.dy)[row * a.width + j]);
      store(sum, gradient[j]);
    }
  }
};

template <class T>
struct LayerNormForwardBody {
  LayerNormForwardArguments a;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t row) const {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    const T* weight = static_cast<const T*>(a.weight);
    const T* bias = static_cast<const T*>(a.bias);
    T* y = static_cast<T*>(a.y) + row * a.width;
    const float inverse_count = 1.0f / static_cast<float>(a.width);
    float sum = 0;
    for (std::uint64_t j = team.rank(); j < a.width; j += team.size()) sum += load(x[j]);
    const float mean = team.sum(sum) * inverse_count;
    float squares = 0;
    for (std::uint64_t j = team.rank(); j < a.width; j += team.size()) {
      const float difference = load(x[j]) - mean;
      squares += difference * difference;
    }
    const float scale = 1.0f / sqrtf(team.sum(squares) * inverse_count + 1e-5f);
    for (std::uint64_t j = team.rank(); j < a.width; j += team.size())
      store((load(x[j]) - mean) * scale * load(weight[j]) + load(bias[j]), y[j]);
    if (team.rank() == 0) a.moments[row] = {mean, scale};
  }
};

template <class T>
struct LayerNormBackwardBody {
  LayerNormBackwardArguments a;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t row) const {
    const T* x = static_cast<const T*>(a.x) + row * a.width;
    const T* dy = static_cast<const T*>(a.dy) + row * a.width;
    const T* weight = static_cast<const T*>(a.weight);
    T* dx = static_cast<T*>(a.dx) + row * a.width;
    const RowMoments moments = a.moments[row];
    const float inverse_count = 1.0f / static_cast<float>(a.width);
    float g_sum = 0;
    float gx_sum = 0;
    for (std::uint64_t j = team.rank(); j < a.width; j += team.size()) {
      const float g = load(dy[j]) * load(weight[j]);
      g_sum += g;
      gx_sum += g * ((load(x[j]) - moments.mean) * moments.inverse_deviation);
    }
    const float g_mean = team.sum(g_sum) * inverse_count;
    const float gx_mean = team.sum(gx_sum) * inverse_count;
    for (std::uint64_t j = team.rank(); j < a.width; j += team.size()) {
      const float normalized = (load(x[j]) - moments.mean) * moments.inverse_deviation;
      const float gradient = moments.inverse_deviation *
                             ((load(dy[j]) * load(weight[j]) - g_mean) - normalized * gx_mean);
      store(a.into == Into::kAccumulate ? load(dx[j]) + gradient : gradient, dx[j]);
    }
  }
};

// The element (piece, column) is the sum of one column over the kPartialRows rows of one piece.
// `partials` has the sums of the bias first, then the sums of the weight.
template <class T>
struct LayerNormPartialsBody {
  LayerNormBackwardArguments a;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t i) const {
    const std::uint64_t column = i % a.width;
    const std::uint64_t begin = i / a.width * kPartialRows;
    const std::uint64_t end = begin + kPartialRows < a.rows ? begin + kPartialRows : a.rows;
    float bias = 0;
    float weight = 0;
    for (std::uint64_t row = begin; row < end; ++row) {
      const float g = load(static_cast<const T*>(a.dy)[row * a.width + column]);
      const float x = load(static_cast<const T*>(a.x)[row * a.width + column]);
      const RowMoments moments = a.moments[row];
      bias += g;
      weight += g * ((x - moments.mean) * moments.inverse_deviation);
    }
    a.partials[i] = bias;
    a.partials[sum_partials(a.rows, a.width) + i] = weight;
  }
};

template <class T>
struct ColumnPartialsBody {
  const T* values;
  float* partials;
  std::uint64_t rows;
  std::uint64_t width;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t i) const {
    const std::uint64_t begin = i / width * kPartialRows;
    const std::uint64_t end = begin + kPartialRows < rows ? begin + kPartialRows : rows;
    float sum = 0;
    for (std::uint64_t row = begin; row < end; ++row) sum += load(values[row * width + i % width]);
    partials[i] = sum;
  }
};

// The element i is the sum of column i over all pieces.
template <class G>
struct FinishSumsBody {
  const float* partials;
  G* sums;
  std::uint64_t pieces;
  std::uint64_t width;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t i) const {
    float sum = 0;
    for (std::uint64_t piece = 0; piece < pieces; ++piece) sum += partials[piece * width + i];
    store(sum, sums[i]);
  }
};

inline constexpr float kGeluScale = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.044715f;

template <class T>
struct GeluForwardBody {
  const T* x;
  T* y;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t i) const {
    const float v = load(x[i]);
    const float two_u = kGeluScale * (v + kGeluCubic * (v * v * v));
    store(v / (1.0f + expf(-two_u)), y[i]);
  }
};

template <class T>
struct GeluBackwardBody {
  const T* x;
  T* gradient;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t i) const {
    const float v = load(x[i]);
    const float two_u = kGeluScale * (v + kGeluCubic * (v * v * v));
    const float two_du = kGeluScale * (1.0f + (3.0f * kGeluCubic) * (v * v));
    // Let s be sigmoid(2u). Then y' = s + v s (1 - s) (2u)'. If exp(-2u) overflows, s is 0.
    const float s = 1.0f / (1.0f + expf(-two_u));
    const float other = 1.0f / (1.0f + expf(two_u));  // 1 - s without cancellation
    store(load(gradient[i]) * (s + v * s * other * two_du), gradient[i]);
  }
};

// Each team computes one query row of one head. The index counts the rows of [sequences, heads,
// sequence].
template <class T>
struct SoftmaxForwardBody {
  SoftmaxArguments a;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t index) const {
    const std::uint64_t visible = index % a.sequence + 1;
    const float* scores = a.scores + index * a.sequence;
    T* probabilities = static_cast<T*>(a.probabilities) + index * a.sequence;
    float most = scores[0];
    for (std::uint64_t j = team.rank(); j < visible; j += team.size())
      most = most < scores[j] ? scores[j] : most;
    most = team.max(most);
    float sum = 0;
    for (std::uint64_t j = team.rank(); j < visible; j += team.size())
      sum += expf(a.scale * (scores[j] - most));
    sum = team.sum(sum);
    const float inverse = 1.0f / sum;
    for (std::uint64_t j = team.rank(); j < a.sequence; j += team.size())
      store(j < visible ? expf(a.scale * (scores[j] - most)) * inverse : 0.0f, probabilities[j]);
    if (team.rank() == 0) a.log_sums[index] = a.scale * most + logf(sum);
  }
};

template <class T>
struct SoftmaxBackwardBody {
  SoftmaxBackwardArguments a;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t index) const {
    const SoftmaxArguments& f = a.forward;
    const std::uint64_t head = index / f.sequence % f.heads;
    const std::uint64_t first_row = index / f.sequence / f.heads * f.sequence;
    const std::uint64_t row = index % f.sequence;
    const std::uint64_t at = (first_row + row) * a.y_stride + head * a.head_width;
    float dot = 0;
    for (std::uint64_t j = team.rank(); j < a.head_width; j += team.size())
      dot += load(static_cast<const T*>(a.y)[at + j]) * load(static_cast<const T*>(a.dy)[at + j]);
    const float delta = team.sum(dot);
    const float* scores = f.scores + index * f.sequence;
    const float* d_probabilities = a.d_probabilities + index * f.sequence;
    T* probabilities = static_cast<T*>(f.probabilities) + index * f.sequence;
    T* d_scores = static_cast<T*>(a.d_scores) + index * f.sequence;
    for (std::uint64_t j = team.rank(); j < f.sequence; j += team.size()) {
      const float p = j <= row ? expf(f.scale * scores[j] - f.log_sums[index]) : 0.0f;
      store(p, probabilities[j]);
      store(p * (d_probabilities[j] - delta) * f.scale, d_scores[j]);
    }
  }
};

// Each team computes the loss of one row. If `gradient` is true, the team also overwrites the
// logits with the gradient of the mean loss.
template <class T>
struct CrossEntropyBody {
  CrossEntropyArguments a;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t row) const {
    T* logits = static_cast<T*>(a.logits) + row * a.stride;
    const std::uint64_t target = a.targets[row];
    float most = load(logits[0]);
    for (std::uint64_t j = team.rank(); j < a.vocabulary; j += team.size()) {
      const float logit = load(logits[j]);
      most = most < logit ? logit : most;
    }
    most = team.max(most);
    // The sum leaves out the target. The body computes p - 1 from this sum, so nothing cancels,
    // even if the target is nearly certain.
    float others = 0;
    for (std::uint64_t j = team.rank(); j < a.vocabulary; j += team.size())
      others += j == target ? 0.0f : expf(load(logits[j]) - most);
    others = team.sum(others);
    const float target_logit = load(logits[target]) - most;
    const float sum = others + expf(target_logit);
    if (team.rank() == 0) a.row_losses[row] = logf(sum) - target_logit;
    if (!a.gradient) return;
    const float factor = a.gradient_scale / (sum * static_cast<float>(a.rows));
    team.sum(0.0f);  // after this call, all threads have read the target's logit
    for (std::uint64_t j = team.rank(); j < a.vocabulary; j += team.size())
      store((j == target ? -others : expf(load(logits[j]) - most)) * factor, logits[j]);
  }
};

// One team computes the mean. The team's index is 0.
struct MeanBody {
  const float* values;
  double* mean;
  std::uint64_t count;
  template <class Team>
  SLUICE_HOST_DEVICE void operator()(const Team& team, std::uint64_t) const {
    float sum = 0;
    for (std::uint64_t i = team.rank(); i < count; i += team.size()) sum += values[i];
    sum = team.sum(sum);
    if (team.rank() == 0) *mean = static_cast<double>(sum) / static_cast<double>(count);
  }
};

// The body computes one element of a plain product. Tests compare fast products with this plain
// product.
template <class T, class Result>
struct ProductBody {
  Product p;
  SLUICE_HOST_DEVICE void operator()(std::uint64_t index) const {
    const std::uint64_t batch = index / (p.m * p.n);
    const std::uint64_t i = index / p.n % p.m;
    const std::uint64_t j = index % p.n;
    const bool a_transposed = p.form == Form::kAtB;
    const bool b_transposed = p.form == Form::kABt;
    const T* a =
        static_cast<const T*>(p.a) + batch * p.a_batch_stride + (a_transposed ? i : i * p.a_stride);
    const T* b =
        static_cast<const T*>(p.b) + batch * p.b_batch_stride + (b_transposed ? j * p.b_stride : j);
    const std::uint64_t a_step = a_transposed ? p.a_stride : 1;
    const std::uint64_t b_step = b_transposed ? 1 : p.b_stride;
    float sum = 0;
    for (std::uint64_t l = 0; l < p.k; ++l) sum += load(a[l * a_step]) * load(b[l * b_step]);
    const std::uint64_t at = batch * p.result_batch_stride + i * p.result_stride + j;
    if (p.addend != nullptr) sum += load(static_cast<const Result*>(p.addend)[at]);
    if (p.bias != nullptr) sum += load(static_cast<const T*>(p.bias)[j]);
    store(sum, static_cast<Result*>(p.result)[at]);
  }
};

}  // namespace sluice::gpt
