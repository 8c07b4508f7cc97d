package login

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/chap"
)

func TestCHAPLogin(t *testing.T) {
	for _, first := range []func(...string) []byte{normal, discovery} {
		for _, nsg := range []Stage{OperationalNegotiation, FullFeature} {
			i := newInitiator(t, chapConfig(t))
			i.secure(first("AuthMethod=CHAP,None"), nsg)
			require.Equal(t, nsg == FullFeature, i.m.Done())
			if nsg == OperationalNegotiation {
				resp, _ := i.ok(OperationalNegotiation, FullFeature, true,
					text("HeaderDigest=None"))
				require.True(t, resp.Transit)
				require.True(t, i.m.Done())
			}
			require.Equal(t, user, i.m.Result().User)
		}
	}
}

func TestMutualCHAPLogin(t *testing.T) {
	i := newInitiator(t, chapConfig(t))
	keys := i.challenge(normal("AuthMethod=CHAP"))
	const backC = "0x000102030405060708090a0b0c0d0e0f"
	resp, got := i.ok(SecurityNegotiation, OperationalNegotiation, true,
		text("CHAP_N="+user, "CHAP_R="+answer(t, keys, secret), "CHAP_I=0xff", "CHAP_C="+backC))
	require.True(t, resp.Transit)
	require.Equal(t, map[string]string{"CHAP_N": ownUser,
		"CHAP_R": answer(t, map[string]string{"CHAP_A": "7", "CHAP_I": "255", "CHAP_C": backC},
			ownSecret)}, got)
}

// TestTransitWaitsForAuthentication asks for the transition in every request from the first one.
func TestTransitWaitsForAuthentication(t *testing.T) {
	for _, nsg := range []Stage{OperationalNegotiation, FullFeature} {
		i := newInitiator(t, chapConfig(t))
		resp, keys := i.ok(SecurityNegotiation, nsg, true, normal("AuthMethod=CHAP"))
		require.False(t, resp.Transit)
		require.Equal(t, "CHAP", keys["AuthMethod"])
		resp, keys = i.ok(SecurityNegotiation, nsg, true, text("CHAP_A=5"))
		require.False(t, resp.Transit)
		resp, _ = i.ok(SecurityNegotiation, nsg, true, proof(t, keys))
		require.True(t, resp.Transit)
	}
	// Authenticated with T=0: the next request may move on without text.
	i := newInitiator(t, chapConfig(t))
	keys := i.challenge(normal("AuthMethod=CHAP"))
	resp, _ := i.ok(SecurityNegotiation, 0, false, proof(t, keys))
	require.False(t, resp.Transit)
	resp, _ = i.ok(SecurityNegotiation, FullFeature, true, nil)
	require.True(t, resp.Transit)
	require.True(t, i.m.Done())
}

func TestAuthMethod(t *testing.T) {
	const noAuth, noCommon = "no_auth_offered", "no_common_auth"
	for _, tt := range []struct {
		offer string
		// the answer, or the snake_case reason why the login is refused
		required, open string
	}{
		{"None", noAuth, "None"},
		{"CHAP", "CHAP", noCommon},
		{"CHAP,None", "CHAP", "None"},
		{"None,CHAP", "CHAP", "None"},
		{"KRB5,SRP,CHAP", "CHAP", noCommon},
		{"KRB5,None", noAuth, "None"},
		{"Z-com.example.foo", noAuth, noCommon},
		{"chap", noAuth, noCommon},
		{"CHAP ", noAuth, noCommon},
		{"", noAuth, noCommon},
		{"Reject", noAuth, noCommon},
	} {
		for _, required := range []bool{true, false} {
			cfg, want := openConfig(), tt.open
			if required {
				cfg, want = chapConfig(t), tt.required
			}
			i := newInitiator(t, cfg)
			req := &Request{NSG: OperationalNegotiation, Transit: true,
				Data: normal("AuthMethod=" + tt.offer)}
			if strings.Contains(want, "_") {
				i.refused(req, StatusAuthenticationFailure, want)
				continue
			}
			resp, keys := i.ok(SecurityNegotiation, OperationalNegotiation, true, req.Data)
			require.Equal(t, want, keys["AuthMethod"], tt.offer)
			require.Equal(t, want == "None", resp.Transit, tt.offer)
		}
	}
}

func TestAuthenticationIsRequired(t *testing.T) {
	for _, first := range []func(...string) []byte{normal, discovery} {
		for _, nsg := range []Stage{OperationalNegotiation, FullFeature} {
			newInitiator(t, chapConfig(t)).refused(&Request{NSG: nsg, Transit: true, Data: first()},
				StatusAuthenticationFailure, "no_auth_offered")
			newInitiator(t, chapConfig(t)).refused(&Request{NSG: nsg, Transit: true,
				Data: first("AuthMethod=None")}, StatusAuthenticationFailure, "no_auth_offered")
		}
		for _, transit := range []bool{false, true} {
			newInitiator(t, chapConfig(t)).refused(&Request{CSG: OperationalNegotiation,
				NSG: FullFeature, Transit: transit, Data: first()},
				StatusAuthenticationFailure, "no_auth_offered")
		}
	}
}

// TestTargetProposes: the initiator lets us propose a method.
func TestTargetProposes(t *testing.T) {
	i := newInitiator(t, chapConfig(t))
	resp, keys := i.ok(SecurityNegotiation, 0, false, normal())
	require.False(t, resp.Transit)
	require.Equal(t, "CHAP", keys["AuthMethod"])
	_, keys = i.ok(SecurityNegotiation, 0, false, text("AuthMethod=CHAP", "CHAP_A=8"))
	require.Equal(t, "8", keys["CHAP_A"])
	require.NotContains(t, keys, "AuthMethod")
	resp, _ = i.ok(SecurityNegotiation, FullFeature, true, proof(t, keys))
	require.True(t, resp.Transit)

	// The initiator did not wait for our proposal; its own just comes late.
	i = newInitiator(t, chapConfig(t))
	i.ok(SecurityNegotiation, 0, false, normal())
	_, keys = i.ok(SecurityNegotiation, 0, false, text("AuthMethod=CHAP,None"))
	require.Equal(t, "CHAP", keys["AuthMethod"])
	_, keys = i.ok(SecurityNegotiation, 0, false, text("CHAP_A=5"))
	require.Equal(t, "5", keys["CHAP_A"])

	for _, declined := range [][]byte{nil, text("AuthMethod=None"), text("AuthMethod=Reject")} {
		i = newInitiator(t, chapConfig(t))
		i.ok(SecurityNegotiation, 0, false, normal())
		i.refused(&Request{Data: declined}, StatusAuthenticationFailure, "no_auth_offered")
	}
}

func TestMethodAndAlgorithmsTogether(t *testing.T) {
	i := newInitiator(t, chapConfig(t))
	_, keys := i.ok(SecurityNegotiation, 0, false, normal("AuthMethod=CHAP", "CHAP_A=9,6"))
	require.Equal(t, "CHAP", keys["AuthMethod"])
	require.Equal(t, "6", keys["CHAP_A"])
	resp, _ := i.ok(SecurityNegotiation, FullFeature, true, proof(t, keys))
	require.True(t, resp.Transit)
}

func TestCHAPOutOfOrder(t *testing.T) {
	const outOfOrder = "auth_out_of_order"
	for _, tt := range []struct {
		name   string
		cfg    *Config
		before [][]byte
		data   []byte
		status Status
		reason string
	}{
		{"all in one", chapConfig(t), nil,
			normal("AuthMethod=CHAP", "CHAP_A=5", "CHAP_N="+user, "CHAP_R=0x00"),
			StatusInitiatorError, outOfOrder},
		{"no method", chapConfig(t), nil, normal("CHAP_A=5"), StatusInitiatorError, outOfOrder},
		{"response before the algorithm", chapConfig(t), nil,
			normal("AuthMethod=CHAP", "CHAP_N="+user, "CHAP_R=0x00"), StatusInitiatorError,
			outOfOrder},
		{"response with the algorithm", chapConfig(t), [][]byte{normal("AuthMethod=CHAP")},
			text("CHAP_A=5", "CHAP_N="+user, "CHAP_R=0x00"), StatusInitiatorError, outOfOrder},
		{"no algorithm", chapConfig(t), [][]byte{normal("AuthMethod=CHAP")}, nil,
			StatusMissingParameter, "missing_chap_a"},
		{"response instead of the algorithm", chapConfig(t), [][]byte{normal("AuthMethod=CHAP")},
			text("CHAP_N="+user, "CHAP_R=0x00"), StatusMissingParameter, "missing_chap_a"},
		{"algorithm 56", chapConfig(t), [][]byte{normal("AuthMethod=CHAP")}, text("CHAP_A=56"),
			StatusAuthenticationFailure, "no_common_algorithm"},
		{"empty list", chapConfig(t), [][]byte{normal("AuthMethod=CHAP")}, text("CHAP_A="),
			StatusAuthenticationFailure, "no_common_algorithm"},
		{"nothing after the challenge", chapConfig(t),
			[][]byte{normal("AuthMethod=CHAP"), text("CHAP_A=5")}, nil, StatusMissingParameter,
			"missing_chap_n"},
		{"no name", chapConfig(t), [][]byte{normal("AuthMethod=CHAP"), text("CHAP_A=5")},
			text("CHAP_R=0x00"), StatusMissingParameter, "missing_chap_n"},
		{"no response", chapConfig(t), [][]byte{normal("AuthMethod=CHAP"), text("CHAP_A=5")},
			text("CHAP_N=" + user), StatusMissingParameter, "missing_chap_r"},
		{"challenge without response", chapConfig(t),
			[][]byte{normal("AuthMethod=CHAP"), text("CHAP_A=5")},
			text("CHAP_N="+user, "CHAP_I=1", "CHAP_C=0x00"),
			StatusMissingParameter, "missing_chap_r"},
		{"algorithm twice", chapConfig(t), [][]byte{normal("AuthMethod=CHAP"), text("CHAP_A=5")},
			text("CHAP_A=6"), StatusInitiatorError, "duplicate_key"},
		{"method twice", chapConfig(t), [][]byte{normal("AuthMethod=CHAP")},
			text("AuthMethod=CHAP"), StatusInitiatorError, "duplicate_key"},
		{"digest among it", chapConfig(t), [][]byte{normal("AuthMethod=CHAP")},
			text("CHAP_A=5", "HeaderDigest=None"), StatusInitiatorError, "key_not_allowed"},
		{"CHAP when None is agreed on", openConfig(), [][]byte{normal("AuthMethod=CHAP,None")},
			text("CHAP_A=5"), StatusInitiatorError, outOfOrder},
		{"CHAP without a method", openConfig(), nil, normal("CHAP_A=5"), StatusInitiatorError,
			outOfOrder},
	} {
		t.Run(tt.name, func(t *testing.T) {
			i := newInitiator(t, tt.cfg)
			for _, data := range tt.before {
				i.ok(SecurityNegotiation, 0, false, data)
			}
			i.refused(&Request{NSG: FullFeature, Transit: true, Data: tt.data}, tt.status,
				tt.reason)
		})
	}
}

func TestCHAPAfterSuccess(t *testing.T) {
	for _, late := range [][]byte{text("CHAP_I=1", "CHAP_C=0x00"), text("CHAP_C=0x00")} {
		i := newInitiator(t, chapConfig(t))
		keys := i.challenge(normal("AuthMethod=CHAP"))
		i.ok(SecurityNegotiation, 0, false, proof(t, keys))
		i.refused(&Request{NSG: FullFeature, Transit: true, Data: late}, StatusInitiatorError,
			"auth_out_of_order")
	}
}

func TestCHAPResponses(t *testing.T) {
	for _, tt := range []struct {
		name           string
		user, password string
		more           func(challenge string) []string
		status         Status
		reason         string
	}{
		{"wrong password", user, "not the password", nil, StatusAuthenticationFailure,
			"bad_password"},
		{"unknown user", "bob", secret, nil, StatusAuthenticationFailure, "unknown_user"},
		{"our secret", user, ownSecret, nil, StatusAuthenticationFailure, "same_secret"},
		{"our challenge back", user, secret, func(c string) []string {
			return []string{"CHAP_I=1", "CHAP_C=" + c}
		}, StatusAuthenticationFailure, "reflected_challenge"},
		{"response not in hex", user, "", nil, StatusInitiatorError, "bad_chap_r"},
		{"identifier of 256", user, secret, func(string) []string {
			return []string{"CHAP_I=256", "CHAP_C=0x00"}
		}, StatusInitiatorError, "bad_chap_i"},
		{"challenge of 1025", user, secret, func(string) []string {
			return []string{"CHAP_I=1", "CHAP_C=0x" + repeat("ab", 1025)}
		}, StatusInitiatorError, "bad_chap_c"},
	} {
		i := newInitiator(t, chapConfig(t))
		keys := i.challenge(normal("AuthMethod=CHAP"))
		reply := text("CHAP_N="+user, "CHAP_R=0xzz")
		if tt.password != "" {
			reply = proofOf(t, keys, tt.user, tt.password)
		}
		if tt.more != nil {
			reply = append(reply, text(tt.more(keys["CHAP_C"])...)...)
		}
		resp := i.refused(&Request{NSG: OperationalNegotiation, Transit: true, Data: reply},
			tt.status, tt.reason)
		require.NotContains(t, resp.Err.Error(), keys["CHAP_C"][2:], tt.name)
		require.Empty(t, i.m.Result().User, tt.name)
	}
}

// TestIndistinguishable: whatever is wrong with a credential, only the log shows a difference.
func TestIndistinguishable(t *testing.T) {
	var seen []Response
	for _, c := range [][2]string{{user, "not the password"}, {"bob", secret},
		{"", "not the password"}} {
		i := newInitiator(t, chapConfig(t))
		resp := i.m.Step(&Request{NSG: FullFeature, Transit: true,
			Data: proofOf(t, i.challenge(normal("AuthMethod=CHAP")), c[0], c[1])})
		resp.Err, resp.Reason = nil, ""
		seen = append(seen, resp)
	}
	require.Equal(t, StatusAuthenticationFailure, seen[0].Status)
	require.Equal(t, seen[0], seen[1])
	require.Equal(t, seen[0], seen[2])
}

// TestReflectionFromParallelLogin sends the challenge of one connection back on another.
func TestReflectionFromParallelLogin(t *testing.T) {
	cfg := chapConfig(t)
	a, b := newInitiator(t, cfg), newInitiator(t, cfg)
	ka, kb := a.challenge(normal("AuthMethod=CHAP")), b.challenge(normal("AuthMethod=CHAP"))
	b.refused(&Request{Data: text("CHAP_N="+user, "CHAP_R="+answer(t, kb, secret),
		"CHAP_I="+ka["CHAP_I"], "CHAP_C="+ka["CHAP_C"])},
		StatusAuthenticationFailure, "reflected_challenge")
	// A login that was given up leaves nothing behind that could clash with a later one.
	a.m.Close()
	c := newInitiator(t, cfg)
	kc := c.challenge(normal("AuthMethod=CHAP"))
	c.ok(SecurityNegotiation, FullFeature, true,
		text("CHAP_N="+user, "CHAP_R="+answer(t, kc, secret), "CHAP_I=1", "CHAP_C="+ka["CHAP_C"]))
	require.True(t, c.m.Done())
}

func TestBoundInitiatorName(t *testing.T) {
	bind := func(name string) func(*chap.Config) {
		return func(c *chap.Config) { c.InitiatorName = name }
	}
	i := newInitiator(t, chapConfig(t, bind(strings.ToUpper(hostIQN))))
	i.secure(normal("AuthMethod=CHAP"), FullFeature)
	i = newInitiator(t, chapConfig(t, bind("iqn.2001-04.com.example:other")))
	keys := i.challenge(normal("AuthMethod=CHAP"))
	i.refused(&Request{Data: proof(t, keys)}, StatusAuthenticationFailure, "wrong_initiator_name")
}

func TestUnknownKeysDuringSecurity(t *testing.T) {
	i := newInitiator(t, chapConfig(t))
	_, keys := i.ok(SecurityNegotiation, 0, false,
		normal("AuthMethod=CHAP", "X-com.example.a=b", "X#NodeArchitecture=x"))
	require.Equal(t, "NotUnderstood", keys["X-com.example.a"])
	require.NotContains(t, keys, "X#NodeArchitecture")
}
