package chap

import (
	"testing"

	"github.com/stretchr/testify/require"
)

const secretC = "another-secret-of-carol"

// login runs one exchange and calls between after the challenge and before the answer.
func login(t *testing.T, a *Authenticator, user, secret string, between func()) (*Proof, error) {
	t.Helper()
	e := a.Begin(initiatorIQN)
	defer e.Close()
	c, err := e.Start("7")
	require.NoError(t, err)
	between()
	answer := respond(t, c, secret)
	return e.Verify(Reply{Name: &user, Response: &answer,
		Identifier: ptr("1"), Challenge: ptr("0x0102030405060708")})
}

func TestReplace(t *testing.T) {
	nothing := func() {}
	first := Config{Initiator: aliceCred, Target: targetCred}
	second := Config{Initiator: Credential{"carol", NewSecret(secretC)},
		Target: Credential{"other", NewSecret(secretA + "-too")}}
	a := newAuth(t, first)
	proof, err := login(t, a, "alice", secretA, nothing)
	require.NoError(t, err)
	require.Equal(t, "storage", proof.Name)
	require.True(t, a.Knows("alice"))

	// A login that already has its challenge is judged by the configuration at its answer.
	replace := func() { require.NoError(t, a.Replace(second)) }
	_, err = login(t, a, "alice", secretA, replace)
	requireFailure(t, err, FailureAuthentication, "unknown_user")
	require.False(t, a.Knows("alice"))
	proof, err = login(t, a, "carol", secretC, nothing)
	require.NoError(t, err)
	require.Equal(t, "other", proof.Name)
	back := func() { require.NoError(t, a.Replace(first)) }
	_, err = login(t, a, "alice", secretA, back)
	require.NoError(t, err)

	// A bad configuration changes nothing.
	for _, bad := range []Config{
		{},
		{Initiator: Credential{"alice", NewSecret("short")}},
		{Initiator: aliceCred, Target: Credential{"storage", aliceCred.Secret}},
		{Initiator: aliceCred, InitiatorName: "nobody"},
	} {
		require.Error(t, a.Replace(bad))
		_, err = login(t, a, "alice", secretA, nothing)
		require.NoError(t, err)
	}

	bound := first
	bound.InitiatorName = "iqn.2001-04.com.example:another"
	require.NoError(t, a.Replace(bound))
	_, err = login(t, a, "alice", secretA, nothing)
	requireFailure(t, err, FailureAuthentication, "wrong_initiator_name")
}

func TestConfigEqual(t *testing.T) {
	base := func() Config {
		return Config{Initiator: Credential{"alice", NewSecret(secretA)},
			Target:        Credential{"storage", NewSecret(secretB)},
			InitiatorName: initiatorIQN, Algorithms: []Algorithm{MD5}}
	}
	require.True(t, base().Equal(base()))
	require.True(t, Config{}.Equal(Config{}))
	for name, change := range map[string]func(c *Config){
		"user":         func(c *Config) { c.Initiator.Username = "bob" },
		"secret":       func(c *Config) { c.Initiator.Secret = NewSecret(secretC) },
		"no secret":    func(c *Config) { c.Initiator.Secret = Secret{} },
		"target":       func(c *Config) { c.Target = Credential{} },
		"target's":     func(c *Config) { c.Target.Secret = NewSecret(secretC) },
		"name":         func(c *Config) { c.InitiatorName = "" },
		"another name": func(c *Config) { c.InitiatorName += "x" },
		"algorithms":   func(c *Config) { c.Algorithms = nil },
	} {
		changed := base()
		change(&changed)
		require.False(t, changed.Equal(base()), name)
	}
}
