package main

import (
	"context"
	"net/http"
	"strings"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// authenticated lets a client read the metrics if it has a token of the cluster and the right to
// get the path. The API server decides both. A filter in its libraries would make the program
// larger by a third.
func authenticated(config *rest.Config, http *http.Client) (metricsserver.Filter, error) {
	c, err := client.New(config, client.Options{HTTPClient: http})
	return filter(c), err
}

// atOnce is the number of simultaneous questions to the API server. Other requests wait.
const atOnce = 2

func filter(c client.Writer) metricsserver.Filter {
	return func(log logr.Logger, next http.Handler) (http.Handler, error) {
		slots := make(chan struct{}, atOnce)
		return http.HandlerFunc(func(res http.ResponseWriter, req *http.Request) {
			select {
			case slots <- struct{}{}:
			case <-req.Context().Done():
				return
			}
			code, err := admit(req.Context(), c, req)
			<-slots
			if err != nil {
				log.Error(err, "the API server does not say who may read the metrics")
			}
			if code != http.StatusOK {
				http.Error(res, http.StatusText(code), code)
				return
			}
			next.ServeHTTP(res, req)
		}), nil
	}
}

// admit returns the status of the answer to a request: http.StatusOK if it may be answered.
func admit(ctx context.Context, c client.Writer, req *http.Request) (int, error) {
	token, is := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
	if !is || token == "" {
		return http.StatusUnauthorized, nil
	}
	who := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
	if err := c.Create(ctx, who); err != nil {
		return http.StatusInternalServerError, err
	}
	if !who.Status.Authenticated {
		return http.StatusUnauthorized, nil
	}
	user := who.Status.User
	may := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: user.Username, UID: user.UID, Groups: user.Groups,
		Extra: make(map[string]authorizationv1.ExtraValue),
		NonResourceAttributes: &authorizationv1.NonResourceAttributes{Path: req.URL.Path,
			Verb: strings.ToLower(req.Method)}}}
	for key, value := range user.Extra {
		may.Spec.Extra[key] = authorizationv1.ExtraValue(value)
	}
	if err := c.Create(ctx, may); err != nil {
		return http.StatusInternalServerError, err
	}
	if !may.Status.Allowed || may.Status.Denied {
		return http.StatusForbidden, nil
	}
	return http.StatusOK, nil
}
