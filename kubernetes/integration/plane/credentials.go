package plane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevirt.io/disk/internal/testtool/certtest"
)

// users may log in with a token: a name for files, the user, its groups.
var users = []struct{ name, user, groups string }{
	{"admin", "admin", "system:masters"},
	{"manager", "system:kube-controller-manager", ""},
	{"scheduler", "system:kube-scheduler", ""},
}

// credentials makes the keys and tokens of the processes, and the administrator's Config.
func (p *Plane) credentials() error {
	ca, caKey := p.path("ca.crt"), p.path("ca.key")
	if err := errors.Join(certtest.Authority(ca, caKey), certtest.Sign(ca, caKey,
		p.path("server.crt"), p.path("server.key"))); err != nil {
		return err
	}
	trusted, err := os.ReadFile(ca)
	if err != nil {
		return err
	}
	accounts, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	accountsKey, err := x509.MarshalECPrivateKey(accounts)
	if err != nil {
		return err
	}
	accountsPub, err := x509.MarshalPKIXPublicKey(accounts.Public())
	if err != nil {
		return err
	}
	tokens := map[string]string{}
	var csv strings.Builder
	for _, u := range users {
		tokens[u.name] = rand.Text()
		fmt.Fprintf(&csv, "%s,%s,%s,%q\n", tokens[u.name], u.user, u.name, u.groups)
	}
	p.Config = &rest.Config{BearerToken: tokens["admin"], QPS: -1,
		TLSClientConfig: rest.TLSClientConfig{CAData: trusted}}
	return errors.Join(
		p.write("accounts.key", encode("EC PRIVATE KEY", accountsKey)),
		p.write("accounts.pub", encode("PUBLIC KEY", accountsPub)),
		p.write("tokens.csv", []byte(csv.String())),
		p.write("manager.token", []byte(tokens["manager"])),
		p.write("scheduler.token", []byte(tokens["scheduler"])),
	)
}

// kubeconfigs writes a file for each user, now that the server's port is known.
func (p *Plane) kubeconfigs() error {
	for _, u := range users {
		config := rest.CopyConfig(p.Config)
		if token, err := os.ReadFile(p.path(u.name + ".token")); err == nil {
			config.BearerToken = string(token)
		}
		if err := Kubeconfig(config, p.path(u.name+".kubeconfig")); err != nil {
			return err
		}
	}
	return nil
}

// Kubeconfig writes a file with which kubectl and other binaries use config.
func Kubeconfig(config *rest.Config, path string) error {
	const name = "test"
	return clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters: map[string]*clientcmdapi.Cluster{
			name: {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{name: {Token: config.BearerToken}},
		Contexts:       map[string]*clientcmdapi.Context{name: {Cluster: name, AuthInfo: name}},
		CurrentContext: name,
	}, path)
}

func (p *Plane) write(name string, data []byte) error {
	return os.WriteFile(filepath.Join(p.Dir, name), data, 0o600)
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
