package testtool

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// failing is a test that notes why it fails.
type failing struct {
	testing.TB
	why string
}

func (f *failing) Errorf(format string, args ...any) { f.why = fmt.Sprintf(format, args...) }

func (f *failing) FailNow() { runtime.Goexit() }

// TestEventually: a condition is asked until it is met. One that is not met in time fails the test,
// with what it means.
func TestEventually(t *testing.T) {
	asked := 0
	Eventually(t, func() bool { asked++; return asked == 5 }, "never happens")
	require.Equal(t, 5, asked)
	for want, says := range map[string][]any{
		"not met within 10ms":                nil,
		"not met within 10ms: 100% is there": {"100% is there"},
		"not met within 10ms: 2 of 3":        {"%d of %d", 2, 3},
		"not met within 10ms: last 5":        {"last %d", func() any { return asked }},
	} {
		f := &failing{TB: t}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			Within(f, 10*time.Millisecond, func() bool { return false }, says...)
		}()
		<-ended
		require.Contains(t, f.why, want+"\n")
	}
}
