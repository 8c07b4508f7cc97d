package main

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// reviews is an API server that knows two tokens.
type reviews struct {
	client.Writer
	fails bool
}

func (r *reviews) Create(_ context.Context, o client.Object, _ ...client.CreateOption) error {
	if r.fails {
		return errors.New("no connection")
	}
	switch o := o.(type) {
	case *authenticationv1.TokenReview:
		o.Status.Authenticated = o.Spec.Token == "prometheus" || o.Spec.Token == "somebody"
		o.Status.User.Username = o.Spec.Token
	case *authorizationv1.SubjectAccessReview:
		o.Status.Allowed = o.Spec.User == "prometheus" &&
			o.Spec.NonResourceAttributes.Verb == "get" &&
			o.Spec.NonResourceAttributes.Path == "/metrics"
	}
	return nil
}

// TestMetricsAreForThoseWhoMay: without a token of the cluster and the right to read them, nobody
// gets metrics, also when the API server does not answer.
func TestMetricsAreForThoseWhoMay(t *testing.T) {
	api := &reviews{}
	handler, err := filter(api)(logr.Discard(), http.HandlerFunc(func(res http.ResponseWriter,
		_ *http.Request) {
		_, _ = res.Write([]byte("metrics"))
	}))
	require.NoError(t, err)
	get := func(method, path, authorization string) int {
		req := httptest.NewRequest(method, path, nil)
		req.Header.Set("Authorization", authorization)
		res := httptest.NewRecorder()
		handler.ServeHTTP(res, req)
		require.Equal(t, res.Code == http.StatusOK, res.Body.String() == "metrics")
		return res.Code
	}
	require.Equal(t, http.StatusOK, get("GET", "/metrics", "Bearer prometheus"))
	for authorization, code := range map[string]int{"": 401, "Bearer ": 401, "prometheus": 401,
		"Basic prometheus": 401, "Bearer wrong": 401, "Bearer somebody": 403} {
		require.Equal(t, code, get("GET", "/metrics", authorization), authorization)
	}
	require.Equal(t, http.StatusForbidden, get("POST", "/metrics", "Bearer prometheus"))
	require.Equal(t, http.StatusForbidden, get("GET", "/other", "Bearer prometheus"))
	api.fails = true
	require.Equal(t, http.StatusInternalServerError, get("GET", "/metrics", "Bearer prometheus"))
}
