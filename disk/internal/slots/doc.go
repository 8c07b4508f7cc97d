// Package slots bounds background work: how many workers of all disks of a server are at work at
// once, and so the memory of their buffers and the processor time that they take together.
//
// A worker acquires a slot, does steps as long as Slot.More says so, and releases the slot. Who
// rests, waits for space or hangs in storage holds no slot: it releases it first, or the watchdog
// passes it on.
package slots
