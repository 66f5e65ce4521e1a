// The objects that an application holds during a step. A Lease keeps a unit on the device while
// computation uses the unit. A Step or an Inference is one walk through the schedule. All of these
// objects are move-only. A lease cannot outlast its step, and a step cannot outlast its engine. If
// an object has ended, every call on the object fails with kInvalidArgument, and the object's
// destructor does nothing.
//
// Thread rule: one thread at a time. An object may be used on any thread, and not only on the
// thread that made the object. While one thread is inside a call of an engine, a call by another
// thread fails with kInvalidArgument and changes nothing.
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

// Keeps one unit on the device until the lease ends. When the lease ends, an event is recorded on
// the lease's stream, after all work that is enqueued on this stream. Work that is enqueued after
// the end of the lease must not touch the unit. When a lease ends, its stream also waits for the
// work of the unit's previous lease, if this work was on another stream. Leases that are held
// together may end in any order.
class SLUICE_EXPORT Lease {
 public:
  Lease(Lease&& other) noexcept;
  Lease& operator=(Lease&& other) noexcept;
  ~Lease();

  UnitId unit() const { return use_.unit; }

  // Returns the device memory of one tensor of the unit. `tensor` is the index of the tensor in
  // UnitSpec::tensors. The elements have the compute dtype. The address is a multiple of 256 bytes.
  // Only work on the lease's stream may read this memory.
  // Fails with kInvalidArgument if the unit has no such tensor, or if the lease, its step or its
  // engine has ended.
  const std::byte* parameter(std::size_t tensor) const;
  // Does the same as parameter(std::size_t), but returns elements of type T. T is float, Bf16 or
  // Fp16 (sluice/elements.h).
  // Fails in the same cases as parameter(std::size_t). Also fails with kInvalidArgument if T is not
  // the compute dtype.
  template <class T>
  const T* parameter(std::size_t tensor) const {
    require_parameter_dtype(dtype_of<T>);
    return reinterpret_cast<const T*>(parameter(tensor));
  }
  // Returns the device memory of the tensor's gradient. The elements have the gradient dtype. The
  // gradient is zero at first, and work on the lease's stream writes the gradient. With
  // ModelSpec::overwrites_gradients, the gradient is not zero at first.
  // Fails in the same cases as parameter(std::size_t). Also fails with kInvalidArgument if the
  // lease is not for the backward pass, or if the unit is frozen. In both cases, there is no
  // gradient.
  std::byte* gradient(std::size_t tensor) const;
  // Fails in the same cases as gradient(std::size_t). Also fails with kInvalidArgument if T is not
  // the gradient dtype.
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

  const Layout& layout(const char* call) const;  // throws if the lease is over
  std::uint64_t offset_elements(const char* call, std::size_t tensor) const;
  void require_parameter_dtype(DType asked) const;
  void require_gradient_dtype(DType asked) const;

  std::shared_ptr<EngineLink> link_;  // null after a move
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

  // Returns device memory with the size that ModelSpec::boundary_bytes gives. The address is a
  // multiple of 4 KiB. After save(), only work on the lease's stream may write this memory. After
  // load(), only work on the lease's stream may read this memory.
  // Fails with kInvalidArgument if the lease, its step or its engine has ended.
  std::byte* data() const;

  // The call ends the lease early.
  void release();

 private:
  friend class Step;
  friend class Inference;
  ActivationLease(std::shared_ptr<EngineLink> link, const LeasedActivation& lease);

  std::shared_ptr<EngineLink> link_;  // null after a move
  std::uint64_t walk_ = 0;
  bool is_released_ = false;
  LeasedActivation lease_;
};

// One training step. The application acquires and releases units in the order of the schedule, and
// then finish() updates the state. If a step omits a unit, repeats a unit or uses a unit out of
// order, computation has to wait. The engine then expects that the next step uses the units in this
// new order. A step uses announced units (UnitSpec::is_announced) in the order of their
// announcement. An announced unit may be used at any place between the uses of other units.
class SLUICE_EXPORT Step {
 public:
  Step(Step&& other) noexcept;
  Step& operator=(Step&&) = delete;
  // If finish() was not called, the destructor abandons the step. The state is then not updated,
  // and the leases of the step end. The eager policy is an exception: it may have updated blocks
  // before finish(). The engine is poisoned by such an abandoned step, and every later call fails
  // with kPoisoned. OverlapPolicy says when kAuto may mean eager.
  // With several ranks, the destructor waits for the other ranks in all transfers that the step has
  // begun. A rank that fails therefore calls RankWorld::abort() before this destructor runs.
  ~Step();

  // Announces that the step will use each of `units` once in `pass`, in the given order. The new
  // uses come after all uses that were announced before. The engine immediately begins to fetch the
  // announced units, in addition to the fetches of the schedule. Returns the units in the order in
  // which they have to be acquired. With several ranks, all ranks call announce() at the same
  // point. The step then uses all units that any rank has named, in the order of the model. Every
  // rank has to acquire each of these units. If a rank has nothing to compute with a unit, the rank
  // releases the lease immediately, and contributes a gradient of zeros. In Pass::kBackward, every
  // rank has to use the announced units at the same places between the other units. finish() checks
  // this rule.
  // If the units are local units (UnitSpec::is_local), only this rank makes the call. The uses of
  // local units have an order of their own, and may come at any place between the other uses.
  // Fails with:
  // - kInvalidArgument: a unit does not exist, is not an announced unit, or is given twice, or
  //   `pass` is kInference.
  // - kInvalidArgument: with several ranks, some units are local and others are not.
  // - kInvalidArgument: `pass` does not exist.
  // - kInvalidArgument: finish() has ended the uses of the step, and has failed.
  // - kRanks: ranks announce at different points.
  // - kIo and others: a transfer has failed.
  std::vector<UnitId> announce(std::span<const UnitId> units, Pass pass);

  // Makes `unit` available to work that is enqueued on `stream` after this call. The call blocks
  // until the unit's transfers to the device are under way. The stream itself waits for the end of
  // the transfers.
  // Fails with:
  // - kInvalidArgument: the unit does not exist, `stream` is not of the engine's device, or too
  //   many leases are held.
  // - kInvalidArgument: the unit has not been announced, or other units that were announced earlier
  //   have to be used first.
  // - kInvalidArgument: the eager policy has already updated the unit.
  // - kInvalidArgument: finish() has ended the uses of the step, and has failed.
  // - kOutOfMemory: the schedule has changed, and the device window cannot hold the unit beside the
  //   leased units.
  // - kIo and others: a transfer has failed.
  Lease acquire(UnitId unit, Pass pass, const Stream& stream);

  // The functions save() and load() are for activations that the engine keeps. save() returns
  // memory for activation `ref`. Work that is enqueued on `stream` after save() writes this memory.
  // load() returns the memory of a saved activation. Work that is enqueued on `stream` after load()
  // reads this memory. Both functions block until the needed transfers are under way.
  // The application calls save() and load() in a fixed sequence. Uses and boundaries count from 0,
  // and boundary k lies behind use k. Forward use k of a micro-batch loads the value of boundary
  // k - 1, and saves the value of boundary k. The backward pass goes through the same uses, from
  // the last one to the first one. Its use k loads the value of boundary k - 1, loads the gradient
  // of boundary k, and saves the gradient of boundary k - 1. The calls for boundaries that do not
  // exist are left out. In vertical order, every use comes for all micro-batches in turn.
  // Fails with:
  // - kInvalidArgument: `ref` is not the next activation of the sequence, too many activations are
  //   held, or the application keeps activations itself.
  // - kIo and others: a transfer has failed.
  ActivationLease save(const ActivationRef& ref, const Stream& stream);
  ActivationLease load(const ActivationRef& ref, const Stream& stream);

  // The application multiplies the loss by this factor before it computes gradients. The factor is
  // 1 unless Config::Precision::loss_scale sets another scale.
  double loss_scale() const;
  // The number of the update that this step will make. The first update has the number 1.
  std::uint64_t number() const;

  // Waits for all gradients that the step has computed up to now, and returns the norm of these
  // gradients. With this call, an application can log the norm before the update. The result has
  // the same bits as StepReport::gradient_norm under two conditions: no further gradient comes
  // before finish(), and finish() uses the same divisor. The call does not change the step, which
  // may still use more units. If no divisor is given, the norm is computed with the divisor of
  // begin_step(). The result is NaN if a gradient is not finite.
  // With several ranks or a norm group, all members call gradient_norm() at the same point.
  // Fails with:
  // - kInvalidArgument: a lease is held, or there was no backward use.
  // - kInvalidArgument: the divisor is not finite and positive.
  // - kUnsupported: some gradients have not come yet, and several ranks add up gradients only at
  //   the end of the step (sharding.stage 0 or 1, several micro-batches).
  // - kIo and others: a transfer has failed.
  // - kRanks: ranks call gradient_norm() at different points.
  double gradient_norm(std::optional<double> gradient_divisor = {});

  // Waits for the gradients and their norm, and lets the optimizer update every block. If
  // optimizer.overlap is "serial", finish() returns only after the new state has reached its home.
  // Under every other policy, the update continues while the next step computes. If this update
  // fails, a later call reports the failure. Units without a gradient get a gradient of zeros.
  // After a call that has failed, the options of begin_step() still hold, and the application may
  // call finish() again. Unless the step continues, the step takes no more uses.
  // Fails with:
  // - kInvalidArgument: a lease is held, there was no backward use, or an announced use has not
  //   come. The step continues.
  // - kInvalidArgument: begin_step() would refuse the options, or the policy is eager and the
  //   options have changed. The step continues.
  // - kNonFinite: a gradient is not finite. The state is unchanged.
  // - kIo: a transfer has failed. The engine is poisoned.
  // - kRanks: ranks have taken different steps, or used units in backward in different orders.
  //   Nothing is updated, except under the eager policy.
  StepReport finish(const FinishOptions& options = {});

 private:
  friend class Engine;
  explicit Step(std::shared_ptr<EngineLink> link);

  EngineLink& link(const char* call) const;  // throws if the step is over

  std::shared_ptr<EngineLink> link_;  // null after a move
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
  // These functions do the same as Step::save() and Step::load().
  ActivationLease save(const ActivationRef& ref, const Stream& stream);
  ActivationLease load(const ActivationRef& ref, const Stream& stream);

 private:
  friend class Engine;
  explicit Inference(std::shared_ptr<EngineLink> link);

  EngineLink& link(const char* call) const;  // throws if the inference is over

  std::shared_ptr<EngineLink> link_;  // null after a move
  std::uint64_t walk_ = 0;
};

}  // namespace sluice
