// Implements DeviceOps with the kernel bodies of device_bodies.h. The launcher is a CudaLauncher on
// a GPU, and a HostLauncher in tests. A plain kernel computes matrix products. An implementation
// with faster products overrides multiply().
// Thread rule: as for DeviceOps.
#pragma once

#include <string>

#include <sluice/error.h>
#include "tools/gpt/model/device_bodies.h"
#include "tools/gpt/model/device_ops.h"

namespace sluice::gpt {

template <class Launcher>
class DeviceOpsOver : public DeviceOps {
 public:
  DeviceOpsOver(const Launcher& launcher, DType type, DType gradient_type)
      : launcher_(launcher), type_(type), gradient_type_(gradient_type) {
    check_device_types(type, gradient_type);
  }

  DType type() const override { return type_; }
  DType gradient_type() const override { return gradient_type_; }
  std::string description() const override { return "plain kernels"; }

  void multiply(const Product& p, StreamId stream) override {
    const std::uint64_t count = p.batch * p.m * p.n;
    with_type([&]<class T>(T*) {
      if (p.result_type == DType::kFp32) {
        launcher_.elements(stream, count, ProductBody<T, float>{p});
      } else {
        launcher_.elements(stream, count, ProductBody<T, T>{p});
      }
    });
  }

  void embedding_forward(const EmbeddingArguments& a, StreamId stream) override {
    with_type([&]<class T>(T*) { launcher_.teams(stream, a.rows, EmbeddingForwardBody<T>{a}); });
  }

  void embedding_backward(const EmbeddingBackwardArguments& a, StreamId stream) override {
    with_types([&]<class T, class G>(T*, G*) {
      launcher_.teams(stream, a.vocabulary, TokenGradientBody<T, G>{a});
      launcher_.teams(stream, a.context, PositionGradientBody<T, G>{a});
    });
  }

  void layer_norm_forward(const LayerNormForwardArguments& a, StreamId stream) override {
    with_type([&]<class T>(T*) { launcher_.teams(stream, a.rows, LayerNormForwardBody<T>{a}); });
  }

  // The parameters' gradients are computed first, because dx may overwrite dy.
  void layer_norm_backward(const LayerNormBackwardArguments& a, StreamId stream) override {
    const std::uint64_t partials = sum_partials(a.rows, a.width);
    with_types([&]<class T, class G>(T*, G*) {
      launcher_.elements(stream, partials, LayerNormPartialsBody<T>{a});
      launcher_.elements(stream, a.width,
                         FinishSumsBody<G>{a.partials, static_cast<G*>(a.bias_gradient),
                                           partials / a.width, a.width});
      launcher_.elements(
          stream, a.width,
          FinishSumsBody<G>{a.partials + partials, static_cast<G*>(a.weight_gradient),
                            partials / a.width, a.width});
      launcher_.teams(stream, a.rows, LayerNormBackwardBody<T>{a});
    });
  }

  void gelu_forward(const void* x, void* y, std::uint64_t count, StreamId stream) override {
    with_type([&]<class T>(T*) {
      launcher_.elements(stream, count,
                         GeluForwardBody<T>{static_cast<const T*>(x), static_cast<T*>(y)});
    });
  }

  void gelu_backward(const void* x, void* gradient, std::uint64_t count, StreamId stream) override {
    with_type([&]<class T>(T*) {
      launcher_.elements(stream, count,
                         GeluBackwardBody<T>{static_cast<const T*>(x), static_cast<T*>(gradient)});
    });
  }

  void softmax_forward(const SoftmaxArguments& a, StreamId stream) override {
    with_type([&]<class T>(T*) { launcher_.teams(stream, a.rows(), SoftmaxForwardBody<T>{a}); });
  }

  void softmax_backward(const SoftmaxBackwardArguments& a, StreamId stream) override {
    with_type(
        [&]<class T>(T*) { launcher_.teams(stream, a.forward.rows(), SoftmaxBackwardBody<T>{a}); });
  }

  void bias_backward(const void* dy, std::uint64_t rows, std::uint64_t width, float* partials,
                     void* sums, StreamId stream) override {
    const std::uint64_t count = sum_partials(rows, width);
    with_types([&]<class T, class G>(T*, G*) {
      launcher_.elements(stream, count,
                         ColumnPartialsBody<T>{static_cast<const T*>(dy), partials, rows, width});
      launcher_.elements(stream, width,
                         FinishSumsBody<G>{partials, static_cast<G*>(sums), count / width, width});
    });
  }

  void cross_entropy(const CrossEntropyArguments& a, StreamId stream) override {
    with_type([&]<class T>(T*) { launcher_.teams(stream, a.rows, CrossEntropyBody<T>{a}); });
    launcher_.teams(stream, 1, MeanBody{a.row_losses, a.loss, a.rows});
  }

 private:
  template <class Run>
  void with_type(const Run& run) const {
    if (type_ == DType::kFp32) {
      run(static_cast<float*>(nullptr));
    } else {
      run(static_cast<Bf16*>(nullptr));
    }
  }
  template <class Run>
  void with_types(const Run& run) const {
    with_type([&]<class T>(T* type) {
      if (gradient_type_ == DType::kFp32) {
        run(type, static_cast<float*>(nullptr));
      } else {
        run(type, static_cast<Bf16*>(nullptr));
      }
    });
  }

  const Launcher launcher_;
  const DType type_;
  const DType gradient_type_;
};

}  // namespace sluice::gpt
