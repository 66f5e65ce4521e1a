#include <sluice/model_spec.h>

#include <gtest/gtest.h>

#include <sluice/error.h>

namespace sluice {
namespace {

ModelSpec two_units() {
  ModelSpec model;
  model.units.push_back({"a", {{.name = "a.w", .shape = {2, 3}}}});
  model.units.push_back({"b", {{.name = "b.w", .shape = {4}}}});
  return model;
}

std::string complaint_about(const ModelSpec& model) {
  try {
    (void)validated(model);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return error.what();
  }
  return "";
}

TEST(ModelSpec, FillsInOrders) {
  const ModelSpec model = validated(two_units());
  EXPECT_EQ(model.forward_order, (std::vector<UnitId>{UnitId{0}, UnitId{1}}));
  EXPECT_EQ(model.backward_order, (std::vector<UnitId>{UnitId{1}, UnitId{0}}));
  EXPECT_EQ(model.element_count(), 10u);
}

TEST(ModelSpec, RefusesNamesAndSizesThatFilesCannotHold) {
  ModelSpec model = two_units();
  model.units[1].tensors[0].name = "__metadata__";
  EXPECT_EQ(complaint_about(model),
            "model: a tensor cannot have the name \"__metadata__\", which files of safetensors "
            "reserve");
  model.units[1].tensors[0].name = "b\xff";
  EXPECT_EQ(complaint_about(model), "model: the tensor name \"b\xEF\xBF\xBD\" is not UTF-8");
  for (const std::vector<std::uint64_t>& shape :
       {std::vector<std::uint64_t>{1ull << 32, 1ull << 32}, {~0ull, 3}, {1ull << 49}, {~0ull}}) {
    model = two_units();
    model.units[1].tensors[0].shape = shape;
    EXPECT_NE(complaint_about(model).find("model: with tensor \"b.w\" of shape ["),
              std::string::npos);
    model.units[1].tensors[0].shape.push_back(0);
    EXPECT_EQ(complaint_about(model), "");
  }
}

TEST(ModelSpec, RefusesWhatCannotTrain) {
  EXPECT_EQ(complaint_about({}), "model: it has no units");
  ModelSpec model = two_units();
  model.units[1].name = "a";
  EXPECT_EQ(complaint_about(model), "model: the name \"a\" is used twice");
  model = two_units();
  model.units[1].tensors[0].name = "a.w";
  EXPECT_EQ(complaint_about(model),
            "model: tensor \"a.w\" of unit \"b\" has a name that is used twice");
  model = two_units();
  model.units[0].tensors[0].shape = {};
  EXPECT_EQ(complaint_about(model),
            "model: tensor \"a.w\" has no extents; a single number has shape [1]");
  model.units[0].tensors[0].shape = {2, 0};
  EXPECT_EQ(complaint_about(model), "") << "an empty tensor";
  model.units[0].tensors[0].weight_decay = WeightDecay{2};
  EXPECT_EQ(complaint_about(model),
            "model: tensor \"a.w\" has WeightDecay 2, which does not exist");
  model = two_units();
  model.units[1].is_pinned = model.units[1].is_announced = true;
  EXPECT_EQ(complaint_about(model),
            "model: unit \"b\" is pinned and announced; a pinned unit is always on the device, so "
            "leave is_announced out");
  model = two_units();
  model.units[0].tensors.clear();
  EXPECT_EQ(complaint_about(model), "model: unit \"a\" has no tensors");
  model = two_units();
  model.forward_order = {UnitId{2}};
  EXPECT_EQ(complaint_about(model), "model: forward_order names unit 2, but there are only 2");
  model = two_units();
  model.backward_order = {UnitId{1}};
  EXPECT_EQ(complaint_about(model),
            "model: unit \"a\" is not in backward_order, so its gradient would never come");
  model = two_units();
  model.forward_order = {UnitId{0}, UnitId{1}};
  model.backward_order = {};
  model.units[1].is_announced = true;
  EXPECT_EQ(
      complaint_about(model),
      "model: forward_order names unit \"b\", which is announced; leave it out of the order, or "
      "do not set UnitSpec::is_announced");
  model.forward_order = {};
  EXPECT_EQ(complaint_about(model), "");
  EXPECT_EQ(validated(model).forward_order, std::vector{UnitId{0}});
  EXPECT_EQ(validated(model).backward_order, std::vector{UnitId{0}});
  model.units[0].is_announced = true;
  EXPECT_EQ(complaint_about(model),
            "model: every unit is announced; at least one has to stand in forward_order");
  model = two_units();
  model.units[1].is_local = true;
  EXPECT_EQ(complaint_about(model),
            "model: unit \"b\" is local, but not announced, and the orders are those of all ranks; "
            "set UnitSpec::is_announced");
  model = two_units();
  model.concurrent_leases = 0;
  EXPECT_EQ(complaint_about(model),
            "model: concurrent_leases is 0; computation needs at least one lease");
}

}  // namespace
}  // namespace sluice
