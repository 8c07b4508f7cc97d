#!/usr/bin/env bash
# Prints the address of a Debian mirror: the one that this machine's apt is set to use, or Debian's
# own if this is no Debian. With the argument "security", that of the security updates.
# DEBIAN_MIRROR and DEBIAN_SECURITY_MIRROR go first.
set -euo pipefail

mirror=${DEBIAN_MIRROR:-} match='!/-security$/' default=http://deb.debian.org/debian
if [ "${1:-}" = security ]; then
	mirror=${DEBIAN_SECURITY_MIRROR:-} match='/-security$/' default=http://deb.debian.org/debian-security
fi
if [ -z "$mirror" ] && grep -qx 'ID=debian' /etc/os-release 2>/dev/null; then
	# shellcheck disable=SC2016 # apt fills these in
	mirror=$(apt-get indextargets --format '$(SITE) $(RELEASE)' 'Created-By: Packages' |
		awk "$match && !found++ {print \$1}")
fi
echo "${mirror:-$default}"
