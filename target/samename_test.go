package target_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/serving"
	tt "kubevirt.io/disk/target/targettest"
)

// TestOneNameFromTwoHosts logs in with one name, first from one address and then from two. Only the
// second case gets a warning.
func TestOneNameFromTwoHosts(t *testing.T) {
	core, logs := observer.New(zapcore.WarnLevel)
	s := start(t, func(o *options) {
		o.Log, o.LUNs[0].Access = zap.New(core), serving.AccessWriteExclusive
	})
	use := func(host string, isid byte) {
		c, _ := s.loginFrom(t, host, tt.LoginOptions{ISID: [6]byte{0x80, isid}})
		c.MustGood(t, tt.Read10(1, 0, 1))
	}
	use("127.0.0.1", 1)
	use("127.0.0.1", 2)
	require.Empty(t, logs.All(), "two ports of one address are one host")
	use("127.0.0.2", 3)
	use("127.0.0.2", 4)
	require.Len(t, logs.All(), 1)
	m := logs.All()[0].ContextMap()
	require.Equal(t, tt.DefaultInitiator, m["initiator"])
	require.ElementsMatch(t, []any{"127.0.0.1", "127.0.0.2"}, m["addresses"])
}
