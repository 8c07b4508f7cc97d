//go:build race

package nbd

// raceEnabled says whether the tests run with the race detector.
const raceEnabled = true
