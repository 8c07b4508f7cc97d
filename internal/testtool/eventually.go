package testtool

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Timeout is how long a test waits for an event that does not depend on speed. It is many times
// what the event needs, because a busy machine can be that much slower.
const Timeout = time.Minute

// The pause between two looks is a part of the time that a test has waited already, within bounds:
// fast events are seen at once, and slow ones cost few looks. A look that takes long itself, like a
// command, is followed by a longer pause, so that what it waits for gets on.
const (
	leastPause = 20 * time.Microsecond
	mostPause  = 100 * time.Millisecond
	pausePart  = 10
	pauseLooks = 3
)

// Eventually waits until a condition is met that somebody else brings about, and fails the test if
// that takes longer than Timeout. says tells what the condition means, as for fmt.Sprintf. An
// argument that is a func() any is called if the test fails: so the message tells what was there
// instead. The condition is asked in the goroutine of the test, so it may fail the test itself.
func Eventually(t testing.TB, met func() bool, says ...any) {
	t.Helper()
	Within(t, Timeout, met, says...)
}

// Within is Eventually with another timeout.
func Within(t testing.TB, timeout time.Duration, met func() bool, says ...any) {
	t.Helper()
	for began := time.Now(); ; {
		look := time.Now()
		if met() {
			return
		}
		waited, took := time.Since(began), time.Since(look)
		if waited > timeout {
			require.Fail(t, fmt.Sprintf("not met within %v%s", timeout, told(says)))
		}
		time.Sleep(max(min(max(waited/pausePart, leastPause), mostPause), pauseLooks*took))
	}
}

// told is what the caller says about a condition that is not met.
func told(says []any) string {
	if len(says) == 0 {
		return ""
	}
	for i, arg := range says {
		if last, ok := arg.(func() any); ok {
			says[i] = last()
		}
	}
	if format, ok := says[0].(string); ok && len(says) > 1 {
		return ": " + fmt.Sprintf(format, says[1:]...)
	}
	return ": " + fmt.Sprint(says...)
}

// Go does work beside the test, and tells its error.
func Go(work func() error) <-chan error {
	ended := make(chan error, 1)
	go func() { ended <- work() }()
	return ended
}

// Await takes what comes from a channel, and fails the test if nothing does within Timeout.
func Await[T any](t testing.TB, from <-chan T, says ...any) (value T) {
	t.Helper()
	select {
	case value = <-from:
	case <-time.After(Timeout):
		require.Fail(t, fmt.Sprintf("nothing came within %v%s", Timeout, told(says)))
	}
	return value
}

// waitingTime is long enough for what does not wait to be seen, unless the machine is busy.
const waitingTime = 200 * time.Millisecond

// Waits fails the test if something comes from a channel that waits for something else.
func Waits[T any](t testing.TB, from <-chan T, says ...any) {
	t.Helper()
	select {
	case <-from:
		require.Fail(t, "it did not wait"+told(says))
	case <-time.After(waitingTime):
	}
}
