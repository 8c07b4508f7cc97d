//go:build race

package rig

// raceEnabled reports whether the tests run with the race detector. If so, so does the daemon.
const raceEnabled = true
