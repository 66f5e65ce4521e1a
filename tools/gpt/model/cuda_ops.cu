#include "tools/gpt/model/cuda_ops.h"

#include "gpu/cuda/cuda_launcher.h"
#include "tools/gpt/model/cublaslt.h"
#include "tools/gpt/model/device_ops_over.h"
#include "tools/gpt/model/slow_products.h"

namespace sluice::gpt {
namespace {

class CudaOps final : public DeviceOpsOver<CudaLauncher> {
 public:
  CudaOps(CudaDevice& device, DType type, DType gradient_type, ProductKernels products)
      : DeviceOpsOver(CudaLauncher(device), type, gradient_type) {
    const CudaCurrentDevice current(device.ordinal());
    cudaFuncAttributes attributes{};
    SLUICE_CUDA(cudaFuncGetAttributes(&attributes, teams_kernel<MeanBody>));
    if (products == ProductKernels::kFast && CublasLt::why_not().empty())
      cublas_ = std::make_unique<CublasLt>(device);
  }

  std::string description() const override {
    if (cublas_ != nullptr) return "cuBLASLt " + cublas_->version();
    return "plain kernels, which are slow: " + CublasLt::why_not();
  }

  void multiply(const Product& product, StreamId stream) override {
    if (cublas_ != nullptr) {
      if (cublas_->multiply(product, type(), stream)) return;
      slow_products_.note(product, type());
    }
    DeviceOpsOver::multiply(product, stream);
  }

  std::vector<std::string> take_notes() override { return slow_products_.take(); }

 private:
  std::unique_ptr<CublasLt> cublas_;
  SlowProducts slow_products_;
};

}  // namespace

std::unique_ptr<DeviceOps> make_cuda_ops(CudaDevice& device, DType type, DType gradient_type,
                                         ProductKernels products) {
  return std::make_unique<CudaOps>(device, type, gradient_type, products);
}

}  // namespace sluice::gpt
