package login

import (
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/chap"
	"kubevirt.io/disk/internal/testtool"
)

const (
	hostIQN   = "iqn.2001-04.com.example:host"
	targetIQN = "iqn.2017-01.io.kubevirt:wrapper"
	user      = "alice"
	secret    = "0123456789abcdef"
	ownUser   = "storage"
	ownSecret = "fedcba9876543210"
)

// text makes a data segment from key=value strings.
func text(pairs ...string) []byte {
	var b []byte
	for _, p := range pairs {
		b = append(append(b, p...), 0)
	}
	return b
}

// normal is the first text of a normal session, followed by more keys.
func normal(more ...string) []byte {
	return append(text("InitiatorName="+hostIQN, "SessionType=Normal", "TargetName="+targetIQN),
		text(more...)...)
}

func discovery(more ...string) []byte {
	return append(text("InitiatorName="+hostIQN, "SessionType=Discovery"), text(more...)...)
}

func authenticator(t testing.TB, change ...func(*chap.Config)) *chap.Authenticator {
	t.Helper()
	cfg := chap.Config{Initiator: chap.Credential{Username: user, Secret: chap.NewSecret(secret)},
		Target: chap.Credential{Username: ownUser, Secret: chap.NewSecret(ownSecret)}}
	for _, f := range change {
		f(&cfg)
	}
	return testtool.Must(chap.NewAuthenticator(cfg))(t)
}

func openConfig() *Config { return &Config{TargetName: targetIQN, PortalGroupTag: 1} }

func chapConfig(t testing.TB, change ...func(*chap.Config)) *Config {
	c := openConfig()
	c.Auth = authenticator(t, change...)
	return c
}

// keysOf parses a response. A duplicate key fails the test.
func keysOf(t testing.TB, data []byte) map[string]string {
	t.Helper()
	pairs := testtool.Must(ParsePairs(data))(t)
	m := make(map[string]string)
	for _, p := range pairs {
		require.NotContains(t, m, p.Key)
		m[p.Key] = p.Value
	}
	return m
}

// initiator drives a machine.
type initiator struct {
	t testing.TB
	m *Machine
}

func newInitiator(t testing.TB, cfg *Config) *initiator {
	i := &initiator{t, NewMachine(cfg)}
	t.Cleanup(i.m.Close)
	return i
}

// ok sends text and expects success. It returns the keys of the answer.
func (i *initiator) ok(csg, nsg Stage, transit bool, data []byte) (Response, map[string]string) {
	i.t.Helper()
	resp := i.m.Step(&Request{CSG: csg, NSG: nsg, Transit: transit, Data: data})
	require.Equal(i.t, StatusSuccess, resp.Status, "%v", resp.Err)
	require.NoError(i.t, resp.Err)
	require.Empty(i.t, resp.Reason)
	require.Equal(i.t, csg, resp.CSG)
	require.False(i.t, resp.Transit && resp.Continue)
	if !resp.Transit {
		require.Zero(i.t, resp.NSG)
	}
	return resp, keysOf(i.t, resp.Data)
}

// refused sends a request and expects this refusal.
func (i *initiator) refused(req *Request, status Status, reason string) Response {
	i.t.Helper()
	resp := i.m.Step(req)
	i.requireRefused(resp, status, reason)
	return resp
}

func (i *initiator) requireRefused(resp Response, status Status, reason string) {
	i.t.Helper()
	require.Equal(i.t, status, resp.Status, "%v: %v", resp.Status, resp.Err)
	require.Equal(i.t, reason, resp.Reason)
	require.Error(i.t, resp.Err)
	require.Less(i.t, len(resp.Err.Error()), 400)
	for _, s := range []string{secret, ownSecret, "\x00", "\n"} {
		require.NotContains(i.t, resp.Err.Error(), s)
	}
	require.False(i.t, resp.Transit)
	require.Empty(i.t, resp.Data)
	require.False(i.t, i.m.Done())
	again := i.m.Step(&Request{Data: normal()})
	require.Equal(i.t, StatusInitiatorError, again.Status)
	require.Equal(i.t, "login_over", again.Reason)
}

// answer computes CHAP_R for the challenge in keys.
func answer(t testing.TB, keys map[string]string, secret string) string {
	t.Helper()
	alg := testtool.Must(strconv.Atoi(keys["CHAP_A"]))(t)
	id := testtool.Must(strconv.ParseUint(keys["CHAP_I"], 10, 8))(t)
	c := testtool.Must(chap.ParseBinary(keys["CHAP_C"]))(t)
	return chap.FormatBinary(chap.Algorithm(alg).Response(byte(id), []byte(secret), c))
}

// proofOf is a reply to the challenge in keys, and proof is the right one.
func proofOf(t testing.TB, keys map[string]string, name, password string) []byte {
	t.Helper()
	return text("CHAP_N="+name, "CHAP_R="+answer(t, keys, password))
}

func proof(t testing.TB, keys map[string]string) []byte {
	t.Helper()
	return proofOf(t, keys, user, secret)
}

// challenge logs in as far as the target's challenge.
func (i *initiator) challenge(first []byte) map[string]string {
	i.t.Helper()
	resp, keys := i.ok(SecurityNegotiation, OperationalNegotiation, false, first)
	require.False(i.t, resp.Transit)
	require.Equal(i.t, "CHAP", keys["AuthMethod"])
	_, keys = i.ok(SecurityNegotiation, 0, false, text("CHAP_A=7,5"))
	require.Equal(i.t, "7", keys["CHAP_A"])
	return keys
}

// secure authenticates and asks for stage nsg.
func (i *initiator) secure(first []byte, nsg Stage) Response {
	i.t.Helper()
	keys := i.challenge(first)
	resp, _ := i.ok(SecurityNegotiation, nsg, true, proof(i.t, keys))
	require.True(i.t, resp.Transit)
	require.Equal(i.t, nsg, resp.NSG)
	return resp
}

// operate negotiates keys in a session without authentication, up to full feature phase.
func operate(t testing.TB, cfg *Config, first func(...string) []byte,
	keys ...string) (map[string]string, Params) {
	t.Helper()
	i := newInitiator(t, cfg)
	resp, got := i.ok(OperationalNegotiation, FullFeature, true, first(keys...))
	require.True(t, resp.Transit)
	require.True(t, i.m.Done())
	delete(got, "TargetPortalGroupTag")
	return got, i.m.Result().Params
}

func repeat(s string, n int) string { return strings.Repeat(s, n) }
