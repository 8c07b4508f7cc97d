// Package webhook answers the API server of a cluster that has no MutatingAdmissionPolicy: it gives
// pods their disks by package inject, as the policies of kubernetes/config do elsewhere.
//
// The certificate is made here and needs no operator. It is in one Secret, which all replicas
// share. Whoever finds it missing or near its end makes a new one. The authority that signed it
// goes into the webhook configurations, together with the one before, so that replicas may change
// their certificate one after the other. Nothing keeps the key of an authority.
//
// Only pods with the annotation of a VMIdentitySet cause a request, by the matchConditions of the
// configurations. So an outage of the controller holds nobody else up.
package webhook
