// Package slots bounds the background work of a server: how many workers of all its disks run at
// once. That also bounds the memory of their buffers and the processor time that they use.
//
// A worker acquires a slot, does steps as long as Slot.More allows, and releases the slot. A worker
// that rests or waits for space releases its slot first. If one hangs in storage, the watchdog
// passes its slot on.
package slots
