// Package slots bounds the background work of a server: how many workers of all its disks run at
// once. That also bounds the memory of their buffers and the processor time that they use.
//
// disk/instance makes three sets of slots for a server: for disks that copy, for disks whose image
// is far away, and for hashes. A worker acquires a slot, does steps as long as Slot.More allows,
// and releases the slot. A worker that rests or waits for space releases its slot first. If a
// worker hangs in storage, the watchdog gives its slot to another.
package slots
