// The objects that an application holds during a step. A Lease keeps a unit on the device while
// computation uses the unit. A Step or an Inference is one walk through the schedule. All of these
// objects are move-only. A lease ends with its step at the latest, and a step ends with its engine.
// Every call on an object that is over fails with kInvalidArgument, and the object's destructor
// does nothing.
//
// Thread rule: one thread at a time, which need not be the thread that made the object. A call
// during another thread's call of the same engine fails with kInvalidArgument and changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include <sluice/device.h>
#include <sluice/elements.h>
#include <sluice/export.h>
#include <sluice/step_report.h>
#include <sluice/use.h>

namespace sluice {

class Layout;
struct EngineLink;

// Keeps one unit on the device until the lease ends. At the end, an event is recorded on the
// lease's stream behind all work enqueued there. Work enqueued after the end must not touch the
// unit. If the unit's previous lease was on another stream, work enqueued after the end also waits
// for the work of that lease.
class SLUICE_EXPORT Lease {
 public:
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease();

  UnitId unit() const { return use_.unit; }

  // Device memory of tensor number `tensor` of the unit (in the order of UnitSpec::tensors), in the
  // compute dtype, 256 B aligned. Only work on the lease's stream may read this memory.
  // Fails with kInvalidArgument if the unit has no such tensor, or if the lease, its step or its
  // engine is over.
  const std::byte* parameter(std::size_t tensor) const;
  // Does the same as parameter(std::size_t), but gives elements of T: float, Bf16 or Fp16
  // (sluice/elements.h).
  // Fails in the same cases, and with kInvalidArgument if T is not the compute dtype.
  template <class T>
  const T* parameter(std::size_t tensor) const {
    require_parameter_dtype(dtype_of<T>);
    return reinterpret_cast<const T*>(parameter(tensor));
  }
  // Device memory of the tensor's gradient, in the gradient dtype. The gradient is zero at first,
  // and work on the lease's stream writes it.
  // Fails in the same cases, and with kInvalidArgument if there is no gradient, because the lease
  // is not for backward or the unit is frozen.
  std::byte* gradient(std::size_t tensor) const;
  // Fails in the same cases, and with kInvalidArgument if T is not the gradient dtype.
  template <class T>
  T* gradient(std::size_t tensor) const {
    require_gradient_dtype(dtype_of<T>);
    return reinterpret_cast<T*>(gradient(tensor));
  }
  // The index of the tensor `name` in UnitSpec::tensors.
  // Fails with kInvalidArgument if no tensor has that name, or if the lease is over. The message
  // names the unit's tensors.
  std::size_t tensor(std::string_view name) const;

  // The call ends the lease early.
  void release();

 private:
  friend class Step;
  friend class Inference;
  Lease(std::shared_ptr<EngineLink> link, const LeasedUse& use);

  const Layout& layout(const char* call) const;  // throws once the lease is over
  std::uint64_t offset_elements(const char* call, std::size_t tensor) const;
  void require_parameter_dtype(DType asked) const;
  void require_gradient_dtype(DType asked) const;

  std::shared_ptr<EngineLink> link_;  // null once moved from
  std::uint64_t walk_ = 0;
  bool is_released_ = false;
  LeasedUse use_;
};

// Keeps one boundary activation on the device until the lease ends. Config::Activations says
// whether the engine keeps activations. An ActivationLease ends in the same way as a Lease.
class SLUICE_EXPORT ActivationLease {
 public:
  ActivationLease(ActivationLease&& other) noexcept;
  ActivationLease& operator=(ActivationLease&& other) noexcept;
  ~ActivationLease();

  // Device memory, 4 KiB aligned, ModelSpec::boundary_bytes long. Only work on the lease's stream
  // may write this memory (after save()) or read it (after load()).
  // Fails with kInvalidArgument if the lease, its step or its engine is over.
  std::byte* data() const;

  // The call ends the lease early.
  void release();

 private:
  friend class Step;
  friend class Inference;
  ActivationLease(std::shared_ptr<EngineLink> link, const LeasedActivation& lease);

  std::shared_ptr<EngineLink> link_;  // null once moved from
  std::uint64_t walk_ = 0;
  bool is_released_ = false;
  LeasedActivation lease_;
};

// One training step. The application acquires and releases units in the order of the schedule, and
// then finish() updates the state. If a step leaves a unit out, repeats it or uses it out of order,
// computation has to wait. The next step is then expected to use the units in the same order as
// this one. A step uses announced units (UnitSpec::is_announced) in the order of their
// announcement, at any place between the other units.
class SLUICE_EXPORT Step {
 public:
  Step(Step&& other) noexcept;
  Step& operator=(Step&&) = delete;
  // Without finish(), the step is abandoned: nothing is updated, and leases that are held end.
  ~Step();

  // Announces that the step will use each of `units` once in `pass`, in this order. These uses
  // follow the uses that were announced before. The fetches of these units begin at once, beside
  // the fetches of the schedule. Returns the units in the order in which they have to be acquired.
  // With several ranks, all ranks announce at the same point. The uses are the units of all ranks,
  // in the order of the model. Every rank acquires each of these units. A rank that has nothing to
  // compute with a unit releases the lease at once, and contributes a gradient of zeros. In
  // Pass::kBackward, all ranks use announced units at the same places between the other units. The
  // call finish() checks this.
  // A call with local units (UnitSpec::is_local) is of this rank alone: no other rank makes it, and
  // their uses come in an order of their own, at any place between the other uses.
  // Fails with:
  // - kInvalidArgument: a unit does not exist, is not an announced unit, or is given twice, or
  //   `pass` is kInference.
  // - kInvalidArgument: with several ranks, some units are local and others are not.
  // - kRanks: ranks announce at different points.
  // - kIo and others: a transfer has failed.
  std::vector<UnitId> announce(std::span<const UnitId> units, Pass pass);

  // Makes `unit` available to work enqueued on `stream` after this call. The call blocks until the
  // unit's transfers are on their way to the device. The stream itself waits for the end of the
  // transfers.
  // Fails with:
  // - kInvalidArgument: the unit does not exist, `stream` is not of the engine's device, or too
  //   many leases are held.
  // - kInvalidArgument: the unit is used too late, before it has been announced, or before others
  //   that were announced earlier.
  // - kInvalidArgument: the eager policy has already updated the unit.
  // - kOutOfMemory: the schedule has changed, and the device window cannot hold the unit beside the
  //   leased units.
  // - kIo and others: a transfer has failed.
  Lease acquire(UnitId unit, Pass pass, const Stream& stream);

  // The functions save() and load() are for activations that the engine keeps. The call save()
  // gives memory for activation `ref`. Work that is enqueued on `stream` after the call writes this
  // memory. The call load() gives the memory of a saved activation. Work that is enqueued after the
  // call reads this memory. The calls follow the sequence of engine/plan/activation_plan.h, which
  // skips no use and repeats none. Both calls block until the needed transfers are under way.
  // Fails with:
  // - kInvalidArgument: `ref` is not next, too many are held, or the application keeps activations
  //   itself.
  // - kIo and others: a transfer has failed.
  ActivationLease save(const ActivationRef& ref, const Stream& stream);
  ActivationLease load(const ActivationRef& ref, const Stream& stream);

  // The application multiplies the loss by this factor before it computes gradients. The factor is
  // 1 unless Config::Precision::loss_scale says otherwise.
  double loss_scale() const;
  // The number of the update that this step will make; updates count from 1.
  std::uint64_t number() const;

  // Waits for the gradients that have come so far, and returns their norm. The result has the bits
  // of StepReport::gradient_norm, if finish() follows with the same divisor and no gradient comes
  // in between. So an application can log the norm before the update. The call changes nothing: the
  // step may use more units. Without a divisor, the norm is that under begin_step()'s divisor. The
  // result is NaN if a gradient is not finite.
  // With several ranks, and with a norm group, all members ask at the same point.
  // Fails with:
  // - kInvalidArgument: a lease is held, or there was no backward use.
  // - kInvalidArgument: the divisor is not finite and positive.
  // - kUnsupported: several ranks add up gradients only at the end of the step (sharding.stage 0 or
  //   1, several micro-batches), and a gradient is still to come.
  // - kIo and others: a transfer has failed.
  // - kRanks: ranks ask at different points.
  double gradient_norm(std::optional<double> gradient_divisor = {});

  // Waits for the gradients and their norm, and lets the optimizer update every block. Under
  // optimizer.overlap "serial", finish() returns when the new state is at home. Otherwise the
  // update continues while the next step computes, and a later call reports a failure of the
  // update. Units without a gradient get a gradient of zeros.
  // Fails with:
  // - kInvalidArgument: a lease is held, there was no backward use, or an announced use has not
  //   come. The step continues.
  // - kInvalidArgument: begin_step() would refuse the options, or the options have changed under
  //   the eager policy. The step continues.
  // - kNonFinite: a gradient is not finite. The state is unchanged.
  // - kIo: a transfer has failed. The engine is poisoned.
  // - kRanks: ranks have taken different steps, or used units in backward in different orders.
  //   Nothing is updated, except under the eager policy.
  StepReport finish(const FinishOptions& options = {});

 private:
  friend class Engine;
  explicit Step(std::shared_ptr<EngineLink> link);

  EngineLink& link(const char* call) const;  // throws once the step is over

  std::shared_ptr<EngineLink> link_;  // null once moved from
  std::uint64_t walk_ = 0;
};

// An inference consists of forward passes without gradients, one per batch. The destructor ends the
// inference, even in the middle of a pass.
class SLUICE_EXPORT Inference {
 public:
  Inference(Inference&& other) noexcept;
  Inference& operator=(Inference&&) = delete;
  ~Inference();

  // Does the same as Step::announce() with Pass::kInference.
  std::vector<UnitId> announce(std::span<const UnitId> units);
  // Does the same as Step::acquire() with Pass::kInference.
  Lease acquire(UnitId unit, const Stream& stream);
  // The functions save() and load() do the same as those of Step.
  ActivationLease save(const ActivationRef& ref, const Stream& stream);
  ActivationLease load(const ActivationRef& ref, const Stream& stream);

 private:
  friend class Engine;
  explicit Inference(std::shared_ptr<EngineLink> link);

  EngineLink& link(const char* call) const;  // throws once the inference is over

  std::shared_ptr<EngineLink> link_;  // null once moved from
  std::uint64_t walk_ = 0;
};

}  // namespace sluice
