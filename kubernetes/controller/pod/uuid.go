package pod

import "github.com/google/uuid"

// uuidOf is the SMBIOS UUID of one of many machines: version 5 (RFC 9562, section 5.5) of the set's
// UUID and the identity's name. The API server has validated the UUID. Anything else is returned as
// it is.
func uuidOf(namespace, name string) string {
	space, err := uuid.Parse(namespace)
	if err != nil {
		return namespace
	}
	return uuid.NewSHA1(space, []byte(name)).String()
}
