// GPT-2 in double precision. The code is as plain as the formulas. The reference is the oracle of
// the tests in this folder. The reference has only the forward pass. Gradients are computed by
// central differences. In double precision, the error of these gradients (about 1e-9) is far below
// the error of fp32. The reference shares no code with tools/gpt.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <numbers>
#include <string>
#include <vector>

#include "tools/gpt/model/gpt_config.h"

namespace sluice::gpt::reference {

using Vector = std::vector<double>;

// y [rows, n] = x [rows, k] * w [k, n] + b [n].
inline Vector linear(const Vector& x, const Vector& w, const Vector& b) {
  const std::size_t n = b.size();
  const std::size_t k = w.size() / n;
  const std::size_t rows = x.size() / k;
  Vector y(rows * n);
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t j = 0; j < n; ++j) {
      double sum = b[j];
      for (std::size_t i = 0; i < k; ++i) sum += x[r * k + i] * w[i * n + j];
      y[r * n + j] = sum;
    }
  }
  return y;
}

inline Vector layer_norm(const Vector& x, const Vector& weight, const Vector& bias) {
  const std::size_t n = weight.size();
  Vector y(x.size());
  for (std::size_t r = 0; r < x.size() / n; ++r) {
    double mean = 0;
    for (std::size_t i = 0; i < n; ++i) mean += x[r * n + i] / static_cast<double>(n);
    double variance = 0;
    for (std::size_t i = 0; i < n; ++i)
      variance += (x[r * n + i] - mean) * (x[r * n + i] - mean) / static_cast<double>(n);
    for (std::size_t i = 0; i < n; ++i)
      y[r * n + i] = (x[r * n + i] - mean) / std::sqrt(variance + 1e-5) * weight[i] + bias[i];
  }
  return y;
}

inline double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}

// The function attention() turns qkv [batch * sequence, 3 * heads * head_width] into a
// result [batch * sequence, heads * head_width].
struct AttentionExtents {
  std::size_t sequence, heads, head_width;
};
inline Vector attention(const Vector& qkv, AttentionExtents extents) {
  const auto [sequence, heads, head_width] = extents;
  const std::size_t width = heads * head_width;
  const std::size_t rows = qkv.size() / (3 * width);
  Vector y(rows * width);
  for (std::size_t row = 0; row < rows; ++row) {
    const std::size_t first = row / sequence * sequence;
    for (std::size_t head = 0; head < heads; ++head) {
      const double* query = &qkv[row * 3 * width + head * head_width];
      Vector weights;
      double total = 0;
      for (std::size_t t = first; t <= row; ++t) {
        const double* key = &qkv[t * 3 * width + width + head * head_width];
        double score = 0;
        for (std::size_t i = 0; i < head_width; ++i) score += query[i] * key[i];
        weights.push_back(std::exp(score / std::sqrt(static_cast<double>(head_width))));
        total += weights.back();
      }
      for (std::size_t t = first; t <= row; ++t) {
        const double* value = &qkv[t * 3 * width + 2 * width + head * head_width];
        for (std::size_t i = 0; i < head_width; ++i)
          y[row * width + head * head_width + i] += weights[t - first] / total * value[i];
      }
    }
  }
  return y;
}

inline double cross_entropy(const Vector& logits, const std::vector<std::uint32_t>& targets) {
  const std::size_t n = logits.size() / targets.size();
  double loss = 0;
  for (std::size_t r = 0; r < targets.size(); ++r) {
    double total = 0;
    for (std::size_t i = 0; i < n; ++i) total += std::exp(logits[r * n + i]);
    loss += std::log(total) - logits[r * n + targets[r]];
  }
  return loss / static_cast<double>(targets.size());
}

using Parameters = std::map<std::string, Vector>;

inline void add(Vector& target, const Vector& source) {
  for (std::size_t i = 0; i < target.size(); ++i) target[i] += source[i];
}

// [tokens, vocabulary]
inline Vector logits(const GptConfig& config, const Parameters& p,
                     const std::vector<std::uint32_t>& tokens, std::size_t sequence) {
  const std::size_t width = config.embedding;
  Vector x(tokens.size() * width);
  for (std::size_t t = 0; t < tokens.size(); ++t)
    for (std::size_t i = 0; i < width; ++i)
      x[t * width + i] =
          p.at("wte.weight")[tokens[t] * width + i] + p.at("wpe.weight")[t % sequence * width + i];
  for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
    const std::string h = "h." + std::to_string(layer);
    const auto get = [&](const char* name) -> const Vector& { return p.at(h + name); };
    Vector y = layer_norm(x, get(".ln_1.weight"), get(".ln_1.bias"));
    y = linear(y, get(".attn.c_attn.weight"), get(".attn.c_attn.bias"));
    y = attention(y, {sequence, config.heads, width / config.heads});
    add(x, linear(y, get(".attn.c_proj.weight"), get(".attn.c_proj.bias")));
    y = layer_norm(x, get(".ln_2.weight"), get(".ln_2.bias"));
    y = linear(y, get(".mlp.c_fc.weight"), get(".mlp.c_fc.bias"));
    for (double& value : y) value = gelu(value);
    add(x, linear(y, get(".mlp.c_proj.weight"), get(".mlp.c_proj.bias")));
  }
  x = layer_norm(x, p.at("ln_f.weight"), p.at("ln_f.bias"));
  const Vector& table = p.at(config.tied_head ? "wte.weight" : "lm_head.weight");
  Vector transposed(table.size());
  for (std::size_t v = 0; v < config.vocabulary; ++v)
    for (std::size_t i = 0; i < width; ++i)
      transposed[i * config.vocabulary + v] = table[v * width + i];
  return linear(x, transposed, Vector(config.vocabulary, 0.0));
}

// Returns the derivative of f with respect to *x.
template <class Function>
double central_difference(double* x, const Function& f) {
  constexpr double kStep = 1e-5;
  const double saved = *x;
  *x = saved + kStep;
  const double above = f();
  *x = saved - kStep;
  const double below = f();
  *x = saved;
  return (above - below) / (2 * kStep);
}

}  // namespace sluice::gpt::reference
