// The DeviceOps of a GPU. A launcher runs the kernel bodies, and cuBLASLt computes the products. If
// cuBLASLt has no algorithm for a product, the plain body computes the product, and the user gets a
// note. The launcher is CudaLauncher on a GPU. Tests use other launchers, and another library in
// place of cuBLASLt.
// Thread rule: as for DeviceOps.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/gpt/model/cublaslt.h"
#include "tools/gpt/model/cuda_ops.h"
#include "tools/gpt/model/device_ops_over.h"
#include "tools/gpt/model/slow_products.h"

namespace sluice::gpt {

template <class Launcher>
class CudaOpsOver final : public DeviceOpsOver<Launcher> {
 public:
  // `device` must outlive the object.
  CudaOpsOver(CudaDevice& device, DType type, DType gradient_type, ProductKernels products)
      : DeviceOpsOver<Launcher>(Launcher(device), type, gradient_type) {
    if (products == ProductKernels::kFast && CublasLt::why_not().empty())
      cublas_ = std::make_unique<CublasLt>(device);
  }

  std::string description() const override {
    if (cublas_ != nullptr) return "cuBLASLt " + cublas_->version();
    return "plain kernels, which are slow: " + CublasLt::why_not();
  }

  void multiply(const Product& product, StreamId stream) override {
    if (cublas_ != nullptr) {
      if (cublas_->multiply(product, this->type(), stream)) return;
      slow_products_.note(product, this->type());
    }
    DeviceOpsOver<Launcher>::multiply(product, stream);
  }

  std::vector<std::string> take_notes() override { return slow_products_.take(); }

 private:
  std::unique_ptr<CublasLt> cublas_;
  SlowProducts slow_products_;
};

}  // namespace sluice::gpt
