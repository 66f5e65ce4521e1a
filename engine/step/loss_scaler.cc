#include "engine/step/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(options),
      scale_(options.static_scale != 0
                 ? options.static_scale
                 : std::ldexp(1.0, static_cast<int>(options.initial_scale_power))),
      hysteresis_left_(options.hysteresis) {
  SLUICE_CHECK(options.hysteresis >= 1 && options.window >= 1, "a rule without steps");
}

void LossScaler::update(bool has_overflowed) {
  if (options_.static_scale != 0) return;
  if (has_overflowed) {
    good_steps_ = 0;
    if (hysteresis_left_ > 1) {
      --hysteresis_left_;
    } else {
      lower();
    }
    return;
  }
  if (options_.consecutive_hysteresis) hysteresis_left_ = options_.hysteresis;
  if (++good_steps_ < options_.window) return;
  good_steps_ = 0;
  hysteresis_left_ = options_.hysteresis;
  if (scale_ * 2 <= std::numeric_limits<float>::max()) scale_ *= 2;
}

void LossScaler::lower() {
  if (options_.minimum != 0 && scale_ <= options_.minimum)
    throw Error(ErrorCode::kNonFinite,
                fmt::format("a gradient is not finite although the loss scale is down at its "
                            "minimum of {}; lower the learning rate, or look for a NaN in the "
                            "model or the data",
                            options_.minimum));
  // GradScaler, which has no minimum, would come to 0 in fp32.
  const double least =
      std::max(options_.minimum, static_cast<double>(std::numeric_limits<float>::min()));
  scale_ = std::max(scale_ / 2, least);
}

}  // namespace sluice
