// Descriptors of locks (flock), which a forked child closes at once. Otherwise a child that lives
// on would hold a lock for a parent that has ended.
//
// Thread rule: any thread.
#pragma once

namespace sluice {

// Fails with kInvalidArgument if too many descriptors are registered.
void close_in_children(int descriptor);
// Comes before the descriptor is closed. Returns false if this is a child, whose descriptor of that
// number is closed already, and may be another one by now.
bool forget_in_children(int descriptor);

}  // namespace sluice
