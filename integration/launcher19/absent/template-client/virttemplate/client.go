// Package virttemplate stands for the client of KubeVirt's templates of machines, which is on no
// module proxy. No launcher uses it.
package virttemplate

import (
	"errors"

	"k8s.io/client-go/rest"
)

// Client has no server.
type Client struct{}

// NewForConfig fails.
func NewForConfig(*rest.Config) (*Client, error) {
	return nil, errors.New("this program was built without KubeVirt's templates")
}

// TemplateV1beta1 is the client of that version.
func (c *Client) TemplateV1beta1() *Client { return c }

// RESTClient is that of the client.
func (*Client) RESTClient() *rest.RESTClient { return nil }
