"""What the interposer reads and keeps: the limits file of a container and the region its processes share."""
