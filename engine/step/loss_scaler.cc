#include "engine/step/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(options),
      state_{.scale = options.static_scale != 0
                          ? options.static_scale
                          : std::ldexp(1.0, static_cast<int>(options.initial_scale_power)),
             .hysteresis_left = options.hysteresis} {
  SLUICE_CHECK(options.hysteresis >= 1 && options.window >= 1, "a rule without steps");
}

void LossScaler::restore(const LossScaleState& state) {
  if (options_.static_scale != 0) return;
  const bool is_scale = state.scale >= static_cast<double>(std::numeric_limits<float>::min()) &&
                        state.scale <= static_cast<double>(std::numeric_limits<float>::max());
  if (!is_scale || state.hysteresis_left == 0)
    throw Error(ErrorCode::kInput,
                fmt::format("restore: the loss scale {} with {} overflows left before it is halved "
                            "is impossible; check the source of the state",
                            state.scale, state.hysteresis_left));
  state_ = state;
  state_.hysteresis_left = std::min(state.hysteresis_left, options_.hysteresis);
}

void LossScaler::update(bool has_overflowed) {
  if (options_.static_scale != 0) return;
  if (has_overflowed) {
    state_.good_steps = 0;
    if (state_.hysteresis_left > 1) {
      --state_.hysteresis_left;
    } else {
      lower();
    }
    return;
  }
  if (options_.consecutive_hysteresis) state_.hysteresis_left = options_.hysteresis;
  if (++state_.good_steps < options_.window) return;
  state_.good_steps = 0;
  state_.hysteresis_left = options_.hysteresis;
  if (state_.scale * 2 <= std::numeric_limits<float>::max()) state_.scale *= 2;
}

void LossScaler::lower() {
  if (options_.minimum != 0 && state_.scale <= options_.minimum)
    throw Error(ErrorCode::kNonFinite,
                fmt::format("a gradient is not finite although the loss scale is at its "
                            "minimum of {}; lower the learning rate, or look for a NaN in the "
                            "model or the data",
                            options_.minimum));
  // GradScaler, which has no minimum, would come to 0 in fp32.
  const double least =
      std::max(options_.minimum, static_cast<double>(std::numeric_limits<float>::min()));
  state_.scale = std::max(state_.scale / 2, least);
}

}  // namespace sluice
