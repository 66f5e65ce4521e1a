"""The errors of Sluice. Each class is also one of Python's own, so that a program that knows nothing of Sluice catches
it in the right place."""

import errno
import os
import platform


class SluiceError(RuntimeError):
    """Every failure of Sluice; the message names the object, the numbers and what to try."""


class ArgumentError(SluiceError, ValueError):
    """A call that its contract forbids."""


class ConfigError(SluiceError, ValueError):
    """A key or value of the config."""


class StorageError(SluiceError, OSError):
    """A transfer failed, timed out, brought other bytes than were written, or found no space."""


class OutOfMemoryError(SluiceError, MemoryError):
    """A budget of the config, or the machine's memory, is too small."""


class NonFiniteError(SluiceError, ArithmeticError):
    """A gradient or a value that is NaN or infinite."""


class RanksError(SluiceError):
    """Another rank has failed, has not come in time, or does something else."""


class ForkedError(SluiceError):
    """The engine belongs to the process that forked this one."""


NOT_COPIED = ArgumentError("an offloaded model can be neither copied nor pickled: its parameters are not in it; save its "
                           "state_dict() instead, or copy the model before offload()")

OPTIMIZER_NOT_COPIED = ArgumentError("this optimizer keeps its state outside of Python, and can be neither copied nor pickled; save its "
                                     "state_dict() instead")

_BY_STATUS = {2: ArgumentError, 3: ConfigError, 4: ConfigError, 5: StorageError, 6: StorageError, 7: StorageError,
              8: StorageError, 9: OutOfMemoryError, 11: NonFiniteError, 12: RanksError, 14: ForkedError}


_REMEDIES = {errno.ENOSPC: "free space there, or name another folder", errno.EDQUOT: "raise the quota, or name another folder",
             errno.EIO: "check the drive or the server (dmesg)"}


def remedy_of(error: OSError) -> str:
    """Says what to try where a file or folder refuses something."""
    return _REMEDIES.get(error.errno or 0, "check the folder and its mode, or name another")


_HOW_TO_END_A_STEP = ("which a forward with gradients has begun: optimizer.step() ends it, with an update if gradients have come, and "
                      "optimizer.zero_grad() in front of it drops those; evaluate under torch.no_grad()")


def in_a_step(call: str) -> ArgumentError:
    """The error of a call that belongs between steps."""
    return ArgumentError(f"{call} in the middle of a step, {_HOW_TO_END_A_STEP}")


# Remedies of the command line, or for programs of C++ alone.
_WORDS = {"--convert (in C++ CheckpointPrecision::kConvert, in C `converts`)": "convert=True", "--convert": "convert=True",
          " (with `sluice train`: --checkpoint DIR), or make the model as it was when the checkpoint was saved": "",
          "their moments mean different things; start from the weights alone (--init, in a program initialize())": "their moments mean "
          "different things; the values alone can be given to the model before offload()",
          "declare the use in ModelSpec::backward_order, or set optimizer.overlap": "set optimizer.overlap",
          "give them to begin_step()": "change rates between two steps,"}


def _in_words_of_torch(message: str) -> str:
    """Some misuses have other names in a loop of torch than in the C interface."""
    if message.endswith(": the engine is null"):
        return "the optimizer is closed, and its engine is gone; make a new one"
    if message.endswith(": the optimizer is null"):
        return "the optimizer is closed; make a new one"
    if "a step or an inference is still active" in message:
        return (f"this works only between steps, and a step is under way, {_HOW_TO_END_A_STEP}")
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    if f"is in use by process {os.getpid()} on {platform.node()}," in message:
        return message.replace("wait for it to end, or choose another storage.state.name",
                               "the process is this one: close() the optimizer that has the store, which an exception's traceback may keep")
    if "has waited for other ranks" in message:
        return f"{message}. state_dict(), save(), step() and forward are calls that all processes make"
    if "gradient" in message and "not finite" in message:
        head, stop, remedy = message.partition(". Lower the learning rate")
        last = f". If the losses were finite, lower the learning rate{remedy}" if stop else ""
        return (f"{head}. Where this is the first step, or a loss is NaN, parameters were probably read where they have no values: by a loss, "
                "such as a penalty on weights, by another module's forward (name a module that contains both in units=), or between steps, "
                "to copy or average them (do so inside of `with sluice_offload.gathered(model):`). So it is where a tensor leaves a unit's "
                "forward by another object (return it, or keep it in an attribute of its module), and with double backward "
                f"(create_graph=True), which sluice_offload.optim supports{last}")
    return message


def error_of(status: int, message: str) -> SluiceError:
    """The exception for a status of the C interface."""
    return _BY_STATUS.get(status, SluiceError)(_in_words_of_torch(message))
