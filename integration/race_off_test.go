//go:build !race

package integration

// raceEnabled reports whether the tests run with the race detector. If so, so does the daemon.
const raceEnabled = false
