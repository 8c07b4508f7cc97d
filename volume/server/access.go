package server

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"

	"go.uber.org/zap"

	"kubevirt.io/disk/volume/api"
)

// Access says who may send requests. Every field is a file name; "" means none.
type Access struct {
	Cert, Key string // of the server, PEM
	// ClientCA has the certificates that may have signed a client's certificate.
	ClientCA string
	Token    string // has the token of requests
}

// Check refuses an address that other machines can reach, unless every client must prove who it is
// and the connection is encrypted.
func (a Access) Check(loopback bool) error {
	switch {
	case (a.Cert == "") != (a.Key == ""):
		return errors.New("a certificate needs its key: name both files")
	case a.ClientCA != "" && a.Cert == "":
		return errors.New("clients can show certificates only to a server that has one: name the " +
			"files of its certificate and key")
	case loopback:
		return nil
	case a.Cert == "":
		return errors.New("without a certificate everybody on the way could read tokens and " +
			"data: name the files of a certificate and its key, or listen on 127.0.0.1 only")
	case a.Token == "" && a.ClientCA == "":
		return errors.New("everybody who reaches the address could make and delete volumes: name " +
			"a file with a token, or one with the authority of client certificates, or listen on " +
			"127.0.0.1 only")
	}
	return nil
}

// open reports whether clients need no proof.
func (a Access) open() bool { return a.Token == "" && a.ClientCA == "" }

// access admits requests.
type access struct {
	opt Access
	log *zap.Logger

	mu     sync.Mutex
	config *tls.Config // guarded by mu; of the content of the files that were read last
	files  [3][]byte   // guarded by mu; the content that config was made of
	told   string      // guarded by mu; what the log says is wrong with the files
}

// newAccess reads all files once, so that an error in them is known at once.
func newAccess(opt Access, log *zap.Logger) (*access, error) {
	a := &access{opt: opt, log: log}
	if opt.Cert != "" {
		if _, err := a.load(); err != nil {
			return nil, err
		}
	}
	if opt.Token != "" {
		if _, err := readToken(opt.Token); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// admit returns nil if the request is allowed, or else the refusal.
func (a *access) admit(r *http.Request) *api.Error {
	if a.opt.open() {
		if loopbackHost(r.Host) {
			return nil
		}
		return api.Errorf(api.CodeUnauthorized, "only this machine may send requests, to "+
			"localhost or an address such as 127.0.0.1, and this request is for another name")
	}
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		return nil
	}
	if a.opt.Token == "" {
		return api.Errorf(api.CodeUnauthorized, "the request shows no certificate of a client")
	}
	want, err := readToken(a.opt.Token)
	if err != nil {
		a.complain(err)
		return api.Errorf(api.CodeUnavailable, "the server cannot check credentials: its log "+
			"says why")
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		token = ""
	}
	// Hashes have one length, so the time of the comparison does not tell the length of the token.
	shown, right := sha256.Sum256([]byte(strings.TrimSpace(token))), sha256.Sum256(want)
	if subtle.ConstantTimeCompare(shown[:], right[:]) != 1 {
		return api.Errorf(api.CodeUnauthorized, "the request shows no token, or a wrong one: send "+
			"\"Authorization: Bearer TOKEN\"")
	}
	return nil
}

// complain logs a problem with the files, once.
func (a *access) complain(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if text := err.Error(); text != a.told {
		a.told = text
		a.log.Warn("a certificate or token file for volumes cannot be used", zap.Error(err))
	}
}

const (
	minToken = 16 // characters
	maxFile  = 1 << 20
)

// readToken reads the file of the token. Its errors never contain the content.
func readToken(path string) ([]byte, error) {
	text, err := readFile(path)
	if err != nil {
		return nil, fmt.Errorf("the token: %w", err)
	}
	token := bytes.TrimSpace(text)
	if len(token) < minToken || bytes.ContainsAny(token, " \t\r\n") {
		return nil, fmt.Errorf("the token in %q has to be one word of at least %d characters, "+
			"such as \"openssl rand -hex 32\" makes", path, minToken)
	}
	return token, nil
}

func readFile(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("%q is far too large", path)
	}
	return text, err
}

// tlsConfig returns nil without a certificate.
func (a *access) tlsConfig() *tls.Config {
	if a.opt.Cert == "" {
		return nil
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{"h2", "http/1.1"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			config, err := a.load()
			if err != nil {
				a.complain(err)
			}
			return config, nil // the previous one, while the files cannot be used
		},
	}
}

// load returns the configuration that is in the files. If it cannot use them, for example while
// they are being replaced, it returns the previous configuration and the error.
func (a *access) load() (*tls.Config, error) {
	var files [3][]byte
	var err error
	for i, path := range []string{a.opt.Cert, a.opt.Key, a.opt.ClientCA} {
		if path != "" && err == nil {
			files[i], err = readFile(path)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		return a.config, fmt.Errorf("the server's certificate: %w", err)
	}
	if a.config != nil && equal(files, a.files) {
		return a.config, nil
	}
	config, err := a.configOf(files)
	if err != nil {
		return a.config, err
	}
	if a.config != nil {
		a.log.Info("the certificate of the volumes' server has changed")
	}
	a.config, a.files, a.told = config, files, ""
	return config, nil
}

func equal(x, y [3][]byte) bool {
	for i := range x {
		if !bytes.Equal(x[i], y[i]) {
			return false
		}
	}
	return true
}

func (a *access) configOf(files [3][]byte) (*tls.Config, error) {
	cert, err := tls.X509KeyPair(files[0], files[1])
	if err != nil {
		return nil, fmt.Errorf("the certificate %q and the key %q cannot be used: %w", a.opt.Cert,
			a.opt.Key, err)
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert},
		NextProtos: []string{"h2", "http/1.1"}}
	if a.opt.ClientCA == "" {
		return config, nil
	}
	config.ClientCAs = x509.NewCertPool()
	if !config.ClientCAs.AppendCertsFromPEM(files[2]) {
		return nil, fmt.Errorf("%q has no certificate (PEM) of an authority", a.opt.ClientCA)
	}
	config.ClientAuth = tls.VerifyClientCertIfGiven
	return config, nil
}
