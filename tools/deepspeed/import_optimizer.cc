// The optimizer and clipping.
#include <algorithm>
#include <array>
#include <cctype>

#include <fmt/format.h>

#include "tools/deepspeed/import_pass.h"

namespace sluice {
namespace {

const std::string kParams = "optimizer.params.";
// With "torch_adam", DeepSpeed makes a torch.optim.AdamW of what the file says, and no more.
constexpr double kTorchDecay = 0.01;

// Names of transformers and bitsandbytes for AdamW with moments in 8 bits. DeepSpeed has none of
// them, but its users write them. Sluice's moments in 8 bits have the same code book and blocks.
bool is_8bit_adamw(const std::string& name) {
  constexpr std::array kNames{"adamw_8bit", "adamw_bnb_8bit", "adamw8bit", "paged_adamw_8bit",
                              "pagedadamw8bit"};
  return std::ranges::find(kNames, name) != kNames.end();
}

// Sluice's name for DeepSpeed's; empty when Sluice has no such optimizer. DeepSpeed takes its own
// names in any case, and those of torch as they are.
std::string kind_of(const ImportPass& pass, const std::string& type) {
  const std::string name = lower(type);
  if (name == "adamw" || is_8bit_adamw(name)) return "adamw";
  if (name == "adam")
    return pass.boolean(kParams + "adam_w_mode").value_or(true) ? "adamw" : "adam";
  if (name == "lion" || name == "adagrad") return name;
  return type == "SGD" ? "sgd" : "";
}

void import_moments(ImportPass& pass, const std::string& kind) {
  if (kind != "sgd" && kind != "adagrad") {
    const ImportPass::Entry* betas = pass.find(kParams + "betas");
    const OrderedJson pair = betas == nullptr ? OrderedJson({0.9, 0.999}) : betas->value;
    pass.map(kParams + "betas", "optimizer.beta1", pair[0]);
    pass.map(kParams + "betas", "optimizer.beta2", pair[1]);
  }
  if (kind == "adagrad" || kind == "adamw" || kind == "adam")
    pass.map(kParams + "eps", "optimizer.epsilon",
             pass.number(kParams + "eps").value_or(kind == "adagrad" ? 1e-10 : 1e-8));
  if (kind == "sgd")
    pass.map(kParams + "momentum", "optimizer.momentum",
             pass.number(kParams + "momentum").value_or(0));
}

// As Python's `if` takes it: DeepSpeed does no more with the value of torch_adam, and files have
// texts there.
bool is_on(const ImportPass::Entry* entry) {
  if (entry == nullptr) return false;
  const OrderedJson& value = entry->value;
  if (value.is_string()) return value != "";
  return value.is_structured() ? !value.empty() : value != false && value != 0;
}

void import_decay(ImportPass& pass, bool may_be_of_torch) {
  std::string key = kParams + "weight_decay";
  const std::optional<double> written = pass.number(key);
  const std::string of_torch = kParams + "torch_adam";
  const bool is_of_torch = may_be_of_torch && is_on(pass.find(of_torch));
  if (is_of_torch && !written) {
    key = of_torch;
  } else if (pass.find(of_torch) != nullptr) {
    pass.not_needed(of_torch, "the same mathematics");
  }
  const double decay = written.value_or(is_of_torch ? kTorchDecay : 0);
  pass.map(key, "optimizer.weight_decay", decay,
           key == of_torch ? "the default of torch.optim.AdamW" : "");
  if (decay == 0) return;
  pass.map(key, "optimizer.groups",
           OrderedJson::array({{{"tensors", {"*"}}, {"weight_decay", decay}}}),
           "DeepSpeed decays every tensor, biases and norms too");
}

void import_clipping(ImportPass& pass) {
  const double norm = pass.number("gradient_clipping")
                          .value_or(pass.given_number("gradient_clipping")
                                        .value_or(pass.default_number("gradient_clipping")));
  pass.map("gradient_clipping", "optimizer.clip_norm", norm);
  if (norm > 0)
    pass.map("gradient_clipping", "optimizer.clip_epsilon", 1e-6,
             "DeepSpeed divides by the norm + 1e-6");
}

// No optimizer in the file: the program makes it, and options may say how.
void import_absent(ImportPass& pass) {
  const DeepspeedValues& values = pass.values();
  const bool is_refused = pass.has_section("optimizer.params");  // for its missing type
  if (!is_refused && values.names.empty())                       // a program with names has its own
    pass.understood("optimizer",
                    "the file has no optimizer: in DeepSpeed the program makes it. Here the "
                    "config's own keys do (optimizer.*), with Sluice's defaults where nothing is "
                    "given");
  if (const auto rate = pass.given_number(kParams + "lr")) {
    const std::string from = values.assigned.contains("optimizer.learning_rate") ? "--set" : "--lr";
    pass.map(from, "optimizer.learning_rate", *rate);
    if (!pass.has_section("scheduler"))
      pass.map(from, "optimizer.minimum_learning_rate", *rate / 10,
               "Sluice's own schedule, a cosine, ends at a tenth");
  }
  if (!values.betas.empty()) {
    pass.map("--betas", "optimizer.beta1", values.betas[0]);
    pass.map("--betas", "optimizer.beta2", values.betas[1]);
  }
  if (values.epsilon) pass.map("--eps", "optimizer.epsilon", *values.epsilon);
  if (values.weight_decay)
    pass.map("--weight-decay", "optimizer.weight_decay", *values.weight_decay);
}

}  // namespace

void import_optimizer(ImportPass& pass) {
  import_clipping(pass);
  const auto type = pass.text("optimizer.type");
  if (!type) {
    import_absent(pass);
    if (pass.has_section("optimizer.params"))
      pass.refuse("optimizer.params", "optimizer.type is missing; write \"type\": \"AdamW\"");
    return;
  }
  const std::string kind = kind_of(pass, *type);
  if (kind.empty())
    return pass.refuse("optimizer.type",
                       "Sluice has no such optimizer; it has AdamW, Adam, Lion, "
                       "Adagrad and SGD (which one trains as well is for you "
                       "to say)");
  pass.map("optimizer.type", "optimizer.type", kind,
           lower(*type) == "adam" && kind == "adamw" ? "DeepSpeed's Adam is AdamW unless "
                                                       "adam_w_mode is false"
                                                     : "");
  if (is_8bit_adamw(lower(*type)))
    pass.map("optimizer.type", "optimizer.state", "8bit",
             "moments in 8 bits, as bitsandbytes keeps them, in tensors of any length; DeepSpeed "
             "itself has no such type");
  if (pass.find(kParams + "adam_w_mode") != nullptr)
    pass.map(kParams + "adam_w_mode", "optimizer.type", kind);
  pass.settle_section(kParams, kind, *type);
  const double fallback = kind == "adagrad" ? 1e-2 : pass.default_number(kParams + "lr");
  const std::optional<double> given = pass.given_number(kParams + "lr");
  if (!pass.is_auto(kParams + "lr") || given)
    pass.map(kParams + "lr", "optimizer.learning_rate",
             pass.number(kParams + "lr").value_or(given.value_or(fallback)));
  import_moments(pass, kind);
  import_decay(pass, kind == "adamw" && !is_8bit_adamw(lower(*type)));
}

}  // namespace sluice
