package transfer

import (
	"context"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"time"
)

const (
	// timeout is how long connecting may take, and the confirmation at the end.
	timeout = 2 * time.Minute
	// handshake is how long a client may keep others waiting before it has shown the secret.
	handshake = 15 * time.Second
	// minSecret is the least length of a secret, in bytes.
	minSecret = 12
	// done is what a receiver sends at the end, when the disk is complete.
	done = 'D'
)

// Secret is a key that both sides make of the same secret. Anybody who can connect can try secrets
// against it, so the secret has to be random.
type Secret struct{ key ed25519.PrivateKey }

// NewSecret makes the TLS key of a secret.
func NewSecret(secret []byte) (Secret, error) {
	if len(secret) < minSecret {
		return Secret{}, fmt.Errorf("the secret has %d bytes: want %d random ones at least",
			len(secret), minSecret)
	}
	mac := hmac.New(sha256.New, secret)
	_, _ = mac.Write([]byte("kubevirt-disk transfer")) // it never fails
	return Secret{ed25519.NewKeyFromSeed(mac.Sum(nil))}, nil
}

// config is the TLS configuration of both sides: the other side must have the same key.
func (s Secret) config() (*tls.Config, error) {
	template := &x509.Certificate{SerialNumber: big.NewInt(1),
		Subject:  pkix.Name{CommonName: "kubevirt-disk"},
		NotAfter: time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, s.key.Public(), s.key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: s.key}},
		ClientAuth:   tls.RequireAnyClientCert,
		// The name and the issuer in the other side's certificate prove nothing; the key does.
		InsecureSkipVerify: true,
		VerifyConnection: func(state tls.ConnectionState) error {
			other, ok := state.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
			if !ok || !other.Equal(s.key.Public()) {
				return errors.New("the other side has another secret")
			}
			return nil
		},
	}, nil
}

// Serve sends a directory to one client after the other that has the secret, until a client has
// received it completely. It calls tell with the errors of transfers that failed. It closes the
// listener.
func Serve(ctx context.Context, l net.Listener, secret Secret, s *Source, p *Progress,
	tell func(error)) error {
	defer l.Close()
	c, err := secret.config()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	for {
		conn, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				_ = conn.Close()
			}
			return ctx.Err()
		}
		if err != nil {
			return err
		}
		err = serve(ctx, tls.Server(conn, c), s, p)
		if err == nil || ctx.Err() != nil {
			return err
		}
		tell(fmt.Errorf("to %s: %w", conn.RemoteAddr(), err))
	}
}

func serve(ctx context.Context, conn *tls.Conn, s *Source, p *Progress) error {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.NetConn().Close() })
	defer stop()
	_ = conn.SetDeadline(time.Now().Add(handshake))
	if err := conn.HandshakeContext(ctx); err != nil {
		return err
	}
	// From here on there is no deadline: this side reads zeros without sending them, and the other
	// side writes files to storage and reads all of them again. TCP notices if the other machine is
	// gone.
	_ = conn.SetDeadline(time.Time{})
	if err := s.Send(ctx, conn, p); err != nil {
		return err
	}
	var answer [1]byte
	if _, err := io.ReadFull(conn, answer[:]); err != nil || answer[0] != done {
		return errors.Join(errors.New("the other side does not say that it has the disk"), err)
	}
	return nil
}

// Fetch receives a disk from an address, host:port.
func Fetch(ctx context.Context, address string, secret Secret, t *Target, p *Progress) error {
	c, err := secret.config()
	if err != nil {
		return err
	}
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: timeout}, Config: c}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return fetch(ctx, conn, t, p)
}

func fetch(ctx context.Context, conn net.Conn, t *Target, p *Progress) error {
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if err := t.Receive(ctx, conn, p); err != nil {
		return err
	}
	// The disk is complete, even if this message does not arrive.
	_ = conn.SetDeadline(time.Now().Add(timeout))
	_, _ = conn.Write([]byte{done})
	return nil
}
