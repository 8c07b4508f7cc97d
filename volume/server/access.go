package server

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"

	"go.uber.org/zap"

	"kubevirt.io/disk/internal/osfile"
	"kubevirt.io/disk/internal/tlsfiles"
	"kubevirt.io/disk/volume/api"
)

// Access says which clients may send requests. Every field is a file name; "" means none.
type Access struct {
	Cert, Key string // of the server, PEM
	// ClientCA has the certificates that may have signed a client's certificate.
	ClientCA string
	Token    string // has the token of requests
}

// Check refuses an address that other machines can reach, unless every client must authenticate and
// the connection is encrypted.
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

// open reports whether clients need not authenticate.
func (a Access) open() bool { return a.Token == "" && a.ClientCA == "" }

// access admits requests.
type access struct {
	opt Access
	log *zap.Logger

	tls *tls.Config // nil: there is no certificate

	mu   sync.Mutex
	told string // guarded by mu; the last problem with the token's file in the log
}

// newAccess reads all files once, so that an error in them is reported at once.
func newAccess(opt Access, log *zap.Logger) (*access, error) {
	a := &access{opt: opt, log: log}
	if opt.Cert != "" {
		var err error
		a.tls, err = tlsfiles.Config(tlsfiles.Files{Of: "the volumes' server", Cert: opt.Cert,
			Key: opt.Key, ClientCA: opt.ClientCA}, &tls.Config{
			MinVersion: tls.VersionTLS12,
			NextProtos: []string{"h2", "http/1.1"},
			ClientAuth: tls.VerifyClientCertIfGiven,
		}, log)
		if err != nil {
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

// admit returns nil if the request is allowed, otherwise the refusal.
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
	a.complain(err)
	if err != nil {
		return api.Errorf(api.CodeUnavailable, "the server cannot check credentials: its log "+
			"says why")
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		token = ""
	}
	// Compare hashes, which have one length: the time does not reveal the token's length.
	shown, right := sha256.Sum256([]byte(strings.TrimSpace(token))), sha256.Sum256(want)
	if subtle.ConstantTimeCompare(shown[:], right[:]) != 1 {
		return api.Errorf(api.CodeUnauthorized, "the request shows no token, or a wrong one: send "+
			"\"Authorization: Bearer TOKEN\"")
	}
	return nil
}

// complain logs a problem with the token's file, once until the file can be used again.
func (a *access) complain(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == nil {
		a.told = ""
	} else if text := err.Error(); text != a.told {
		a.told = text
		a.log.Warn("the token file for volumes cannot be used", zap.Error(err))
	}
}

const minToken = 16 // characters

// readToken reads the file of the token. Its errors never contain the content.
func readToken(path string) ([]byte, error) {
	text, err := osfile.ReadText(path)
	if err != nil { // the name may be the token, by mistake
		return nil, fmt.Errorf("the file of the token cannot be read: %w", osfile.WithoutPath(err))
	}
	token := bytes.TrimSpace(text)
	if len(token) < minToken || bytes.ContainsAny(token, " \t\r\n") {
		return nil, fmt.Errorf("the token in %q has to be one word of at least %d characters, "+
			"such as \"openssl rand -hex 32\" makes", path, minToken)
	}
	return token, nil
}
