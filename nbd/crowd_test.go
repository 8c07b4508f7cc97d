package nbd

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"kubevirt.io/disk/internal/testtool"
	"kubevirt.io/disk/internal/testtool/certtest"
)

// TestOneClientDoesNotTakeAll: a certificate has its limit of connections, and others still come
// in. Those of the same address with another certificate are other clients.
func TestOneClientDoesNotTakeAll(t *testing.T) {
	v, a := serve(t, 2, nil), newAuthority(t)
	port := v.serveTLS(t, a, nil)
	one := a.issue("one", certtest.Client("one"))
	var all []*client
	for range 256 {
		c := a.secure(t, port, one)
		c.choose("disk1.raw", extended)
		all = append(all, c)
	}
	c := a.secure(t, port, one)
	r := c.option(optGo, infoData("disk1.raw"))
	require.Equal(t, uint32(repErrPolicy), r[0].kind)
	require.Contains(t, string(r[0].data), "cert:one has as many connections as one client may have")
	other := a.secure(t, port, a.issue("two", certtest.Client("two")))
	other.choose("disk2.raw", extended)
	other.writeAt(0, []byte("hello"))
	require.NoError(t, all[0].Close())
	testtool.Eventually(t, func() bool {
		return c.option(optGo, infoData("disk1.raw"))[0].kind == repInfo
	}, "there is room again")
}

// TestFailedGoLeavesNothing: a connection whose GO fails after it has taken the disk ends, and with
// it what it has taken.
func TestFailedGoLeavesNothing(t *testing.T) {
	v := serve(t, 1, nil)
	open := func(session string) *client {
		c := v.hello(t)
		require.Equal(t, uint32(repAck), c.option(optStructuredReply, nil)[0].kind)
		require.Len(t, c.option(optSetMeta, metaData("", sessionContext+session)), 2)
		c.structured = true
		return c
	}
	first := open("a")
	first.info(first.option(optGo, infoData("")))
	first.writeAt(0, []byte("first"))
	late := open("a")
	require.NoError(t, first.Close())
	testtool.Eventually(t, func() bool { return len(v.Sessions()) == 0 }, "the first one has gone")
	second := open("b")
	second.info(second.option(optGo, infoData("")))
	second.writeAt(0, []byte("second")) // now the session a is over

	r := late.option(optGo, infoData(""))
	require.Equal(t, uint32(repErrPolicy), r[0].kind)
	require.Contains(t, string(r[0].data), errOver.Error())
	late.ended()
	testtool.Eventually(t, func() bool { return len(v.Sessions()) == 1 }, "the late one has gone")
	second.alive()
}

// TestStrangersInTheLog: clients without a certificate cost a line of the log a minute, however
// many there are.
func TestStrangersInTheLog(t *testing.T) {
	log, lines := observer.New(zap.WarnLevel)
	v, a := serve(t, 1, nil), newAuthority(t)
	v.log = zap.New(log)
	port := v.serveTLS(t, a, nil)
	for range 20 {
		c := dialPort(t, port)
		c.send(optionBytes(optExportName, nil)) // in plain text: the server ends the connection
		c.ended()
	}
	strangers := func() (n int) {
		for _, l := range lines.All() {
			if strings.Contains(l.Message, "ended") {
				n++
			}
		}
		return n
	}
	testtool.Eventually(t, func() bool { v.mu.Lock(); defer v.mu.Unlock(); return len(v.conns) == 0 },
		"all of them are gone")
	require.Equal(t, 1, strangers())
	n, told := v.failures.Admit(lost{"127.0.0.1", "protocol_error"}, time.Now().Add(failureTold))
	require.True(t, told)
	require.EqualValues(t, 19, n)
}
