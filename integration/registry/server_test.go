package registry

import (
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"kubevirt.io/disk/integration/internal/rig"
)

const (
	registryUser     = "me"
	registryPassword = "pa55word"
	// registryHash is the password's bcrypt hash, as docker-registry needs it.
	registryHash = "$2y$05$abcdefghijklmnopqrstuur.ZxEKly2fYX6K.hrvYXsoEaKgtr95a"
)

// basicAuth returns the settings of a registry with a password.
func basicAuth(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "htpasswd")
	require.NoError(t, os.WriteFile(file, []byte(registryUser+":"+registryHash+"\n"), 0o600))
	return fmt.Sprintf("auth: {htpasswd: {realm: test, path: %q}}\n", file)
}

// tokenAuth starts a server that issues tokens for the password, and returns the settings of a
// registry that requires these tokens (distribution, docs/spec/auth/jwt.md).
func tokenAuth(t *testing.T) (settings string, issued func() int) {
	t.Helper()
	bundle := filepath.Join(t.TempDir(), "bundle.pem")
	own := rig.MakeCertificate(t, bundle, bundle+".key")
	certificate, key := own.Certificate[0], own.PrivateKey.(*ecdsa.PrivateKey)
	var mu sync.Mutex
	n := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != registryUser ||
			password != registryPassword {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		mu.Lock()
		n++
		mu.Unlock()
		var access []map[string]any
		for _, scope := range r.URL.Query()["scope"] {
			if parts := strings.SplitN(scope, ":", 3); len(parts) == 3 {
				access = append(access, map[string]any{"type": parts[0], "name": parts[1],
					"actions": strings.Split(parts[2], ",")})
			}
		}
		now := time.Now().Unix()
		encode := func(v any) string {
			text, err := json.Marshal(v)
			if err != nil {
				panic(err)
			}
			return base64.RawURLEncoding.EncodeToString(text)
		}
		signed := encode(map[string]any{"typ": "JWT", "alg": "ES256",
			"x5c": []string{base64.StdEncoding.EncodeToString(certificate)}}) + "." +
			encode(map[string]any{"iss": "test", "sub": registryUser,
				"aud": r.URL.Query().Get("service"), "exp": now + 60, "nbf": now - 60, "iat": now,
				"jti": fmt.Sprint(n), "access": access})
		sum := sha256.Sum256([]byte(signed))
		a, b, err := ecdsa.Sign(rand.Reader, key, sum[:])
		if err != nil {
			panic(err)
		}
		signature := append(a.FillBytes(make([]byte, 32)), b.FillBytes(make([]byte, 32))...)
		_ = json.NewEncoder(w).Encode(map[string]any{"expires_in": 60,
			"token": signed + "." + base64.RawURLEncoding.EncodeToString(signature)})
	}))
	t.Cleanup(server.Close)
	realm := strings.Replace(server.URL, "127.0.0.1", "localhost", 1) + "/token"
	return fmt.Sprintf("auth: {token: {realm: %q, service: test, issuer: test, "+
			"rootcertbundle: %q}}\n", realm, bundle),
		func() int { mu.Lock(); defer mu.Unlock(); return n }
}
